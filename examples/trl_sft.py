"""Fine-tune with TRL's SFTTrainer on a prepared dataset; stop it at any time and start it again.

    penstock prepare chats.jsonl --tokenizer Qwen3-0.6B/ --template auto --output data/chats
    python examples/trl_sft.py data/chats run                          # a small new Llama
    python examples/trl_sft.py data/chats run --model Qwen3-0.6B/      # or a model of yours
    torchrun --nproc-per-node 2 examples/trl_sft.py data/chats run     # the same steps on two ranks

Needs `pip install 'penstock[huggingface]' trl`.
"""

import argparse

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.trainer_utils import get_last_checkpoint
from trl import SFTConfig

import penstock as ps


def main(
    data: str, run: str, model: str | None, steps: int, sequence_length: int, rows_per_step: int
) -> None:
    """Train up to `steps` steps, from the last checkpoint in `run` if there is one."""
    dataset = ps.Dataset.open(data)
    source = ps.Source(dataset, too_long="drop")
    loader = ps.Loader(
        source,
        sequence_length=sequence_length,
        rows_per_step=rows_per_step,
        seed=7,
        data_parallel=ps.DataParallel.from_env(),
    )
    torch.manual_seed(7)
    if model is None:
        config = LlamaConfig(
            vocab_size=dataset.tokenizer.vocab_size,
            hidden_size=128,
            intermediate_size=344,
            num_hidden_layers=4,
            num_attention_heads=4,
            max_position_embeddings=sequence_length,
        )
        trained = LlamaForCausalLM(config)
    else:
        trained = AutoModelForCausalLM.from_pretrained(model)
    arguments = SFTConfig(
        run,
        max_steps=steps,
        save_steps=20,
        logging_steps=1,
        learning_rate=1e-3,
        report_to=[],
        seed=7,
        bf16=torch.cuda.is_available(),
        use_cpu=not torch.cuda.is_available(),
        gradient_checkpointing=False,
    )
    tokenizer = AutoTokenizer.from_pretrained(model or dataset.path / "tokenizer")
    trainer = ps.trl.SFTTrainer(
        trained, arguments, loader=loader, rows_per_microbatch=2, processing_class=tokenizer
    )
    trainer.train(resume_from_checkpoint=get_last_checkpoint(run))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data")
    parser.add_argument("run")
    parser.add_argument("--model")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--sequence-length", type=int, default=512)
    parser.add_argument("--rows-per-step", type=int, default=8)
    main(**vars(parser.parse_args()))
