"""A small multimodal processor made of transformers' own classes."""

import numpy as np
import torch
from transformers import BatchFeature, ProcessorMixin
from transformers.image_processing_utils import BaseImageProcessor


class TinyImages(BaseImageProcessor):
    """An image is as many patches as it has pixels."""

    model_input_names = ["pixel_values", "patches"]  # noqa: RUF012 - transformers' own attribute

    def __call__(self, images, **kwargs):
        flat = [
            np.asarray(image)
            for row in images
            for image in (row if isinstance(row, list) else [row])
        ]
        patches = np.array([image.size for image in flat])
        pixels = np.concatenate([image.reshape(-1) for image in flat]).astype(np.float32)
        return BatchFeature(
            {"pixel_values": torch.from_numpy(pixels), "patches": torch.from_numpy(patches)}
        )


class TinyProcessor(ProcessorMixin):
    """Writes an image as one placeholder for each of its patches."""

    def __init__(self, image_processor=None, tokenizer=None, chat_template=None):
        self.image_token, self.video_token = "<|image_pad|>", "<|video_pad|>"
        self.image_token_id = tokenizer.convert_tokens_to_ids(self.image_token)
        super().__init__(image_processor, tokenizer, chat_template=chat_template)

    def check_argument_for_proper_class(self, argument_name, argument):
        # Without Pillow transformers has no image processors to compare with.
        return type(argument)

    def replace_image_token(self, image_inputs, image_idx, **kwargs):
        return self.image_token * int(image_inputs["patches"][image_idx])
