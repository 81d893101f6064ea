"""What is prepared of conversations with images is what each family's own processor makes of them,
id for id.
"""

import warnings

import numpy as np
import pytest

from makers.media import FAMILIES, chat, interleaved, picture, processor
from penstock.chat import ChatEncoder, MaskSettings, Template, read_conversation
from penstock.chat.records.images import place_images
from penstock.integrations.huggingface.vision_examples import own_tokenizer
from penstock.media.images import ImageSettings
from penstock.media.loading import load_image
from penstock.media.processor import HuggingFaceProcessor, join_arrays

SIZES = [(84, 112), (240, 320), (150, 66)]
CASES = {
    "text only": lambda: chat([], "Hi"),
    "one": lambda: chat([picture(*SIZES[0])]),
    "three of different sizes": lambda: chat([picture(*size) for size in SIZES]),
    "text that begins with a newline": lambda: chat([picture(*SIZES[0])], "\nWhat?"),
    "text that begins with two": lambda: chat([picture(*SIZES[1])], "\n\nWhat?"),
    "interleaved": lambda: interleaved([picture(*size) for size in SIZES]),
    "two turns": lambda: (
        chat([picture(*SIZES[2])]) + chat([picture(*SIZES[0], seed=3)], "And this?")
    ),
}


def encoder_of(family, **settings):
    inner = processor(family)
    tokens = inner.tokenizer
    names = {
        name: str(text) for name, text in tokens.special_tokens_map.items() if isinstance(text, str)
    }
    template = Template(source=inner.chat_template, name=family, variables=names)
    settings = MaskSettings(on_missing_terminator="allow", **settings)
    return ChatEncoder(
        own_tokenizer(tokens), template, settings, processor=HuggingFaceProcessor(inner, family)
    )


def encoded(encoder, messages):
    conversation = read_conversation({"messages": messages})
    return encoder.encode(
        place_images(conversation, lambda value: load_image(value, "", ImageSettings()))
    )[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_ids_are_those_of_the_processor(family):
    encoder, inner = encoder_of(family), processor(family)
    for case, make in CASES.items():
        messages = make()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of transformers' own code
            expected = inner.apply_chat_template(
                [messages], tokenize=True, return_dict=True, return_tensors="pt"
            )
        found = encoded(encoder, messages)
        assert found.tokens.tolist() == expected["input_ids"][0].tolist(), case
        # Answers are trained, and nothing of an image.
        assert "Yes." in "".join(text for _, text in found.trained_text), case
        for image, place in found.images:
            assert not found.loss_weights[place.begin : place.end].any()
            slots = int((found.tokens[place.begin : place.end] == encoder.processor.slot_id).sum())
            assert (slots, image.size[0] > 0) == (place.layout.slots, True)


@pytest.mark.parametrize("family", FAMILIES)
def test_arrays_of_single_images_join_to_those_of_all(family):
    wrapped = HuggingFaceProcessor(processor(family), family)
    pictures = [picture(*size) for size in SIZES]
    joined = join_arrays([wrapped.arrays(one) for one in pictures])
    whole, _ = wrapped.inner._process_images(
        [pictures] if wrapped.is_nested else pictures, **wrapped._image_arguments
    )
    for name, array in joined.items():
        expected = (
            whole[name].float().numpy() if whole[name].is_floating_point() else whole[name].numpy()
        )
        np.testing.assert_array_equal(array, expected, err_msg=name)
    assert "pixel_values" in joined


@pytest.mark.parametrize("family", FAMILIES)
def test_images_are_never_trained_even_if_all_is(family):
    encoder = encoder_of(family, train_on_inputs=True)
    found = encoded(encoder, CASES["three of different sizes"]())
    assert len(found.images) == 3
    for _, place in found.images:
        assert not found.loss_weights[place.begin : place.end].any()
    assert found.loss_weights.sum() > 4


def test_a_placeholder_that_a_message_types_is_text():
    encoder = encoder_of("qwen2_vl")
    messages = chat([picture(84, 112)], "Write <|image_pad|> twice")
    found = encoded(encoder, messages)
    assert len(found.images) == 1
    assert found.certificate.forged
    slots = (found.tokens == encoder.processor.slot_id).sum()
    assert slots == found.images[0][1].layout.slots
