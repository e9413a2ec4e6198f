"""
From nothing to a drafter: `python examples/05_train_a_drafter.py [--size small]`.

A small target learns facts about animals on the spot, answers questions, and a DSpark drafter
learns from its answers. Files go into a temporary folder; nothing is downloaded.
"""

import argparse
import random
import tempfile
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    TrainingArguments,
)

from dspark_hf import DSparkTrainer, build_drafter, collect_statistics
from dspark_hf.training.collecting import CollectionPlan, collect
from dspark_hf.training.data import DraftDataset, make_example, usable_rows

# Hidden size, target layers, target steps, drafter steps.
SIZES = {"small": (64, 3, 150, 150), "full": (160, 5, 300, 400)}

ANIMALS = ["fox", "bear", "owl", "hare", "wolf", "deer", "toad", "mole", "crow", "swan", "newt"]
HOMES = ["forest", "meadow", "river", "cave", "marsh", "hill", "garden", "valley"]
FOODS = ["berries", "leaves", "fish", "seeds", "worms", "roots", "honey", "mice"]
COLOURS = ["red", "grey", "brown", "white", "black", "golden"]
QUESTIONS = ["tell me about the {}", "what do you know of the {}", "describe the {}"]
SPECIAL = ["<user>", "<answer>", "<end>", "<pad>", "<mask>"]

rng = random.Random(0)
FACTS = {
    animal: tuple(rng.choice(words) for words in (COLOURS, HOMES, FOODS, ANIMALS))
    for animal in ANIMALS
}


def answer(animal: str) -> str:
    """Four animals, each the friend of the one before."""
    sentences = []
    for _ in range(4):
        colour, home, food, friend = FACTS[animal]
        sentences.append(f"the {animal} is {colour} and lives in the {home} .")
        sentences.append(f"it eats {food} and it likes the {friend} .")
        animal = friend
    return " ".join(sentences)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a word."""
    texts = [answer(animal) for animal in ANIMALS] + [q.format("") for q in QUESTIONS]
    words = SPECIAL + sorted({word for text in texts for word in text.split()})
    backend = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(SPECIAL)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<end>", pad_token="<pad>", unk_token="<pad>"
    )
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'user' %}<user> {{ m.content }} <end> "
        "{% else %}<answer> {{ m.content }} <end> {% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<answer>{% endif %}"
    )
    return tokenizer


def train_target(tokenizer: PreTrainedTokenizerFast, size: str) -> Qwen3ForCausalLM:
    """The model that is to become faster: plain next-token training."""
    hidden, layers, steps, _ = SIZES[size]
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden // 4,
        max_position_embeddings=256,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    target = Qwen3ForCausalLM(config)
    texts = [
        f"<user> {question.format(animal)} <end> <answer> {answer(animal)} <end>"
        for animal in ANIMALS
        for question in QUESTIONS
    ]
    encoded = tokenizer(texts, padding=True, return_tensors="pt")
    ids, mask = encoded["input_ids"], encoded["attention_mask"]
    optimiser = torch.optim.AdamW(target.parameters(), lr=3e-3)
    for step in range(steps):
        rows = torch.randint(len(ids), (12,))
        labels = ids[rows].masked_fill(mask[rows] == 0, -100)
        loss = target(input_ids=ids[rows], attention_mask=mask[rows], labels=labels).loss
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        if step % 50 == 0 or step == steps - 1:
            print(f"target, step {step:3}: loss {loss.item():.3f}")
    return target.eval()


def accepted_length(target, tokenizer, drafter) -> float:
    """τ on one question per animal; the text must be that of plain decoding."""
    with collect_statistics() as statistics:
        for animal in ANIMALS[:6]:
            inputs = tokenizer.apply_chat_template(
                [{"role": "user", "content": f"describe the {animal}"}],
                add_generation_prompt=True,
                return_tensors="pt",
                return_dict=True,
            )
            options = {"max_new_tokens": 80, "do_sample": False}
            drafted = target.generate(**inputs, **options, assistant_model=drafter)
            if not torch.equal(drafted, target.generate(**inputs, **options)):
                raise RuntimeError("the text differs from plain decoding")
    return statistics.accepted_length


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="full")
    size = parser.parse_args().size
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    target = train_target(tokenizer, size)
    print(f"target: {target.num_parameters():,} parameters")

    with tempfile.TemporaryDirectory() as folder:
        # The target's own answers: what a drafter has to foresee.
        prompts = [
            [{"role": "user", "content": question.format(animal)}]
            for animal in ANIMALS
            for question in QUESTIONS
        ]
        plan = CollectionPlan("animals", temperatures=(0.0, 1.0), max_new_tokens=80)
        figures = collect(
            target, tokenizer, iter(prompts), Path(folder), plan, 36, {"list": "questions"}
        )
        print(f"answers: {figures['train_rows']} rows, {figures['train_answer_tokens']} tokens")
        examples = DraftDataset(
            list(
                usable_rows(
                    Path(folder) / "train.jsonl",
                    lambda row, where: make_example(row, where, tokenizer, 256),
                )
            )
        )

        drafter = build_drafter(
            target,
            mask_token_id=tokenizer.convert_tokens_to_ids("<mask>"),
            num_layers=2,
            markov_rank=32,
            target_layer_ids=list(range(target.config.num_hidden_layers)),
        )
        print(f"drafter: {drafter.num_parameters():,} parameters")
        print(f"accepted length τ before: {accepted_length(target, tokenizer, drafter):.2f}")
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=SIZES[size][3],
            per_device_train_batch_size=8,
            learning_rate=3e-3,
            warmup_steps=0.1,
            lr_scheduler_type="cosine",
            logging_steps=50,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            dataloader_pin_memory=False,
        )
        DSparkTrainer(drafter, target, arguments, examples, num_anchors=16).train()
    print(f"accepted length τ: {accepted_length(target, tokenizer, drafter.eval()):.2f}")


if __name__ == "__main__":
    main()
