"""Diffusion over masked tokens: a model learns to restore tokens that were replaced by a mask, and
writes text by filling masks in.

    MaskedDiffusion    What [M] 6 × [M] ?      all slots of the document see each other
    BlockDiffusion     [M] is │ What is │ [M] × │ 6 × │ …     noised and clean copy of each block

A level t is drawn for each document, or for each block: uniform in (epsilon, 1]. Each token with a
loss weight w is masked with probability t; the slot of a mask predicts the token that it stands
for, with weight w / t. All other slots predict nothing. The mean over draws of the summed losses is
the negative evidence lower bound of the text in nats, given its length; `Step.loss_denominator`
divides it by the number of trainable tokens.

So the prompt of a chat is never masked: its weights are 0. The model's row differs from what it
learns (`Written.targets`); attention is bidirectional, in a document or a block.

Guarantees: draws depend on the document's key alone, so a run resumes exactly and ranks do not
change it; a level is a multiple of 2^-32, so that probabilities and weights agree exactly. Costs:
one pass, compiled.

Sources: LLaDA, Nie et al. 2025, arXiv:2502.09992 (algorithms 1 and 2); the bound: Sahoo et al.
2024, "Simple and Effective Masked Diffusion Language Models", arXiv:2406.07524; BD3-LM, Arriola et
al. 2025, "Block Diffusion", arXiv:2503.09573.
"""

import dataclasses
import math
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Annotated, Any, Literal, final

import numpy as np

from penstock.core.arrays import Float32, Float64, Int32, Int64, UInt64
from penstock.core.compiled import from_python
from penstock.core.errors import ConfigError
from penstock.core.suggestions import suggests
from penstock.plan.objectives import _diffusion_kernels as kernels
from penstock.plan.objectives.control_tokens import addition, look_up, tokenizer_of
from penstock.plan.objectives.objective import Facts, Nodes, Written

MASKS = ("<|mdm_mask|>", "<|mask|>", "[MASK]", "<mask>", "<|MASK|>")
"""Names that are looked for, best first: LLaDA's, Dream's, BERT's, RoBERTa's, and LLaDA 2's."""
_write, _denominator = from_python(kernels.write_diffusion), kernels.diffusion_denominator
FORMS = ("copies", "prefix")


@suggests
@final
@dataclass(frozen=True, slots=True, kw_only=True)
class MaskedDiffusion:
    """Masked diffusion over whole documents, as LLaDA trains it. A document takes as many slots as
    it has tokens, all of which see each other.
    """

    mask_token: int | str | None = None
    """The mask, as an id or a name; None: the one that the tokenizer has by a known name."""
    epsilon: float = 1e-3
    """The level of noise is drawn from epsilon to 1."""
    tokenizer: str | None = dataclasses.field(default=None, repr=False)
    """A tokenizer with more control entries than the dataset's, in which the name is looked up; see
    `penstock tokenizer add`. None: the dataset's. It is not in the repr, and so not in states: the
    id found counts, not the path.
    """

    def __post_init__(self) -> None:
        _check(self, "masked_diffusion")

    @property
    def name(self) -> str:
        """masked_diffusion"""
        return "masked_diffusion"

    @property
    def bidirectional(self) -> bool:
        """True: all slots of a document see each other."""
        return True

    @property
    def writes_targets(self) -> bool:
        """True: a mask predicts the token that it stands for."""
        return True

    @property
    def rewrites_eos(self) -> bool:
        """True: a model learns where a text ends."""
        return True

    @property
    def added_tokens(self) -> tuple[int, ...]:
        """The id of the mask, if it is known."""
        return (self.mask_token,) if isinstance(self.mask_token, int) else ()

    def resolve(self, facts: Facts) -> "MaskedDiffusion":
        """Look the mask up.

        Raises:
            ConfigError: The tokenizer has none.
        """
        mask = _mask_of(self.mask_token, facts, self.tokenizer, self.name)
        return dataclasses.replace(self, mask_token=mask)

    def document_limit(self, sequence_length: int) -> int:
        """A document takes as many slots as it has tokens."""
        return sequence_length

    def measure(
        self, lengths: Annotated[Int64, "documents"], keys: Annotated[UInt64, "documents"]
    ) -> Annotated[Int64, "documents"]:
        """The lengths themselves."""
        return lengths

    def levels(self, length: int, key: int) -> Annotated[Float64, "1"]:
        """The level of noise of a document of `length` tokens, for inspection."""
        return _levels(self.program(), 1 if length else 0, key)

    def program(self) -> Annotated[Int64, "numbers"]:
        """The program of the compiled writer, after `resolve`."""
        return _program(self.mask_token, self.epsilon)

    def write(
        self,
        tokens: Annotated[Int32, "length"],
        weights: Annotated[Float32, "length"] | None,
        key: int,
    ) -> Written:
        """Mask some tokens of a document; see the class."""
        return _written(self.program(), len(tokens), tokens, weights, key)


@suggests
@final
@dataclass(frozen=True, slots=True, kw_only=True)
class BlockDiffusion:
    """Masked diffusion block by block, as BD3-LM trains it: text is written one block after
    another, and the tokens of a block together.

    `copies`: each block stands twice, noised and clean. A noised block sees itself and the clean
    blocks before it, as it will when text is written; a document of n tokens takes about 2n slots.
    `prefix`: each block stands once, and those with loss weights are noised: half the slots, and
    exact for answers of one block behind a clean prompt; in longer ones, a block sees noised blocks
    before it.

    Blocks are counted from the beginning of a document, after its BOS.
    """

    mask_token: int | str | None = None
    """The mask, as an id or a name; None: the one that the tokenizer has by a known name."""
    block: int = 32
    """Tokens of a block; the last one of a document may have fewer."""
    epsilon: float = 1e-3
    """The level of noise of each block is drawn from epsilon to 1."""
    form: Literal["copies", "prefix"] = "copies"
    """How a document is written; see above."""
    fill_blocks: bool = False
    """Whether the last block is filled up with EOS tokens, which count as much as the last token:
    so a model learns to end a text inside a block.
    """
    tokenizer: str | None = dataclasses.field(default=None, repr=False)
    """A tokenizer with more control entries than the dataset's, in which the name is looked up; see
    `penstock tokenizer add`. None: the dataset's. It is not in the repr, and so not in states: the
    id found counts, not the path.
    """
    filling: int = dataclasses.field(default=-1, init=False)
    """The id of the EOS tokens that fill a block; −1: it is not known yet, or not needed. Found by
    `resolve`.
    """

    def __post_init__(self) -> None:
        _check(self, "block_diffusion")
        block: Any = self.block
        if isinstance(block, bool) or not isinstance(block, Integral) or block < 1:
            raise ConfigError(
                f"block_diffusion: block must be a number of tokens, from 1, got {block!r}"
            )
        object.__setattr__(self, "block", int(block))
        if self.form not in FORMS:
            raise ConfigError(
                f"block_diffusion: form must be {' or '.join(FORMS)}, got {self.form!r}"
            )

    @property
    def name(self) -> str:
        """block_diffusion"""
        return "block_diffusion"

    @property
    def bidirectional(self) -> bool:
        """True: all slots of a block see each other."""
        return True

    @property
    def writes_targets(self) -> bool:
        """True: a mask predicts the token that it stands for."""
        return True

    @property
    def rewrites_eos(self) -> bool:
        """True: a model learns where a text ends."""
        return True

    @property
    def added_tokens(self) -> tuple[int, ...]:
        """The ids of the mask and of what fills blocks, as far as they are known."""
        known = (self.mask_token, self.filling)
        return tuple(token for token in known if isinstance(token, int) and token >= 0)

    def resolve(self, facts: Facts) -> "BlockDiffusion":
        """Look the tokens up.

        Raises:
            ConfigError: The tokenizer lacks one, or a block is longer than a row.
        """
        where = f"{facts.where}: {self.name}"
        if self.document_limit(facts.sequence_length) < 1 or self.block >= facts.sequence_length:
            raise ConfigError(
                f"{where}: a block has {self.block} tokens, and rows of {facts.sequence_length} "
                "slots hold no block and the BOS before it; give smaller blocks (block) or a "
                "longer sequence_length"
            )
        mask = _mask_of(self.mask_token, facts, self.tokenizer, self.name)
        found = dataclasses.replace(self, mask_token=mask)
        if self.fill_blocks:
            object.__setattr__(found, "filling", _eos_of(facts, self.tokenizer, where))
        return found

    def document_limit(self, sequence_length: int) -> int:
        """The longest document, in tokens, that fits a row."""
        # Blocks that are filled up need a slot more for the BOS before them.
        room, block = sequence_length - self.fill_blocks, self.block
        if self.form == "prefix":
            return room // block * block if self.fill_blocks else room
        if self.fill_blocks:
            return (room + block) // (2 * block) * block
        pairs = room // (2 * block)
        return pairs * block + min(room - 2 * pairs * block, block)

    def measure(
        self, lengths: Annotated[Int64, "documents"], keys: Annotated[UInt64, "documents"]
    ) -> Annotated[Int64, "documents"]:
        """Slots: the length, filled up, and once more for the blocks that have a clean copy."""
        filled = np.asarray(lengths, np.int64)
        if self.fill_blocks:
            filled = -(-filled // self.block) * self.block
        if self.form == "prefix":
            return filled
        return filled + (filled - 1) // self.block * self.block

    def nodes(self, slots: int) -> Nodes:
        """The blocks of a document that takes `slots` slots: a clean block is seen by all that
        stands behind it, a noised copy by itself alone.
        """
        block, copies = self.block, self.form == "copies"
        begins = np.arange(0, slots, block)
        reach = np.full(len(begins), slots)
        positions = np.arange(slots)
        if copies:
            reach[::2] = np.minimum(begins[::2] + block, slots)
            positions = positions // (2 * block) * block + positions % block
        return Nodes(begins=begins, reach=reach, positions=positions)

    def levels(self, length: int, key: int) -> Annotated[Float64, "blocks"]:
        """The level of noise of each block of a document of `length` tokens, for inspection."""
        return _levels(self.program(), -(-length // self.block), key)

    def program(self) -> Annotated[Int64, "numbers"]:
        """The program of the compiled writer, after `resolve`."""
        if self.fill_blocks and self.filling < 0:
            raise ConfigError("block_diffusion: EOS is not known yet; call resolve(facts)")
        copies = self.form == "copies"
        return _program(self.mask_token, self.epsilon, self.block, self.filling, copies)

    def write(
        self,
        tokens: Annotated[Int32, "length"],
        weights: Annotated[Float32, "length"] | None,
        key: int,
    ) -> Written:
        """Write a document as blocks; see the class."""
        slots = int(self.measure(np.array([len(tokens)]), np.zeros(1, np.uint64))[0])
        return _written(self.program(), slots, tokens, weights, key)


def _check(objective: MaskedDiffusion | BlockDiffusion, name: str) -> None:
    epsilon: Any = objective.epsilon
    real = isinstance(epsilon, Real) and not isinstance(epsilon, bool)
    if not real or not math.isfinite(epsilon) or not 0 < float(epsilon) < 1:
        raise ConfigError(
            f"{name}: epsilon must be a level of noise above 0 and below 1, got {epsilon!r}"
        )
    object.__setattr__(objective, "epsilon", float(epsilon))
    mask: Any = objective.mask_token
    if mask is None or isinstance(mask, str):
        return
    if isinstance(mask, bool) or not isinstance(mask, Integral) or not 0 <= int(mask) < 2**31:
        raise ConfigError(f"{name}: mask_token must be a token's id or name, got {mask!r}")
    object.__setattr__(objective, "mask_token", int(mask))


def _program(
    mask: int | str | None, epsilon: float, block: int = 0, filling: int = -1, copies: bool = False
) -> Int64:
    """See `_diffusion_kernels`."""
    if not isinstance(mask, int):
        raise ConfigError(
            "diffusion: the id of the mask is not known yet; call resolve(facts), or give an id"
        )
    lowest = max(int(epsilon * kernels.WHOLE), 1)
    numbers = [kernels.DIFFUSION, mask, lowest, block, filling, int(copies)]
    return np.array(numbers, np.int64)


def _levels(program: Int64, blocks: int, key: int) -> Annotated[Float64, "blocks"]:
    drawn = [kernels.level_of(program, block, np.uint64(key)) for block in range(blocks)]
    return np.array(drawn, np.float64) / kernels.WHOLE


def _written(
    program: Int64, slots: int, tokens: Int32, weights: Float32 | None, key: int
) -> Written:
    if weights is not None and len(weights) != len(tokens):
        raise ConfigError(
            f"diffusion: a document of {len(tokens)} tokens has {len(weights)} weights; expected "
            "one each"
        )
    given = np.ascontiguousarray(np.empty(0) if weights is None else weights, np.float32)
    ids, targets = np.empty(slots, np.int32), np.empty(slots, np.int32)
    of_slots = np.empty(slots, np.float32)
    document = np.ascontiguousarray(tokens, np.int32)
    words = np.empty(kernels.words_size(slots), np.uint64)
    _write(program, document, given, np.uint64(key), ids, of_slots, targets, words)
    return Written(
        tokens=ids,
        weights=of_slots,
        targets=targets,
        denominator=float(_denominator(program, len(tokens), given)),
        prefix=slots,
    )


def _mask_of(mask: int | str | None, facts: Facts, extended: str | None, name: str) -> int:
    where = f"{facts.where}: {name}"
    if isinstance(mask, int) and extended is None:
        return mask
    tokenizer = tokenizer_of(facts, extended, where)
    add = f"add one: {addition(tokenizer.name, ['<|mask|>'])}"
    if isinstance(mask, int):
        if mask >= tokenizer.vocab_size:
            raise ConfigError(
                f"{where}: mask_token is {mask}; {tokenizer.name} has ids below "
                f"{tokenizer.vocab_size}; name another, or {add}"
            )
        return mask
    if mask is not None:
        cure = f"name another in mask_token, or {add}"
        return look_up(tokenizer, mask, role="mask_token", where=where, cure=cure)
    known = next((one for one in MASKS if one in tokenizer.special_tokens), None)
    if known is None:
        raise ConfigError(
            f"{where}: {tokenizer.name} has no mask ({', '.join(MASKS)}); name a control entry "
            f"that no text has in mask_token, or {add}"
        )
    return int(tokenizer.special_tokens[known])


def _eos_of(facts: Facts, extended: str | None, where: str) -> int:
    tokenizer = tokenizer_of(facts, extended, where)
    if tokenizer.eos_id is None:
        raise ConfigError(
            f"{where}: fill_blocks fills a block up with EOS, and {tokenizer.name} has none; set "
            "fill_blocks to false"
        )
    return int(tokenizer.eos_id)
