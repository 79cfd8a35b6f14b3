"""Train Medusa heads for the demo model, in one command and from a seed.

Head number i sees the hidden state from which the demo model chooses a token, and learns the probabilities that the
demo model gives to the token 1 + i places behind that one. Each head is one residual block in front of the demo
model's own output matrix, which stays as it is.
"""

import json

import torch
from corpus import Batch
from distillation import Progress, Teacher, distance, parse_arguments
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim import AdamW
from train import MAX_GRADIENT

HEADS = 4
STEPS = 400
RATE = 0.002
WEIGHTS = "medusa_lm_head.safetensors"


class Heads(nn.ModuleList):
    """The residual blocks, as the published checkpoints name them: head, block, linear."""

    def __init__(self, size: int) -> None:
        super().__init__(nn.ModuleList([nn.ModuleDict({"linear": nn.Linear(size, size)})]) for _ in range(HEADS))
        for parameter in self.parameters():
            nn.init.zeros_(parameter)  # at first, each head repeats the model's own guess

    def guess(self, head: int, x: Tensor) -> Tensor:
        """The state of a head [num_tokens, size] for hidden states of the same shape."""
        return x + nn.functional.silu(self[head][0]["linear"](x))


def train_step(heads: Heads, teacher: Teacher, batches: list[Batch]) -> list[float]:
    """Add up gradients of all the batches; returns the mean loss, and each head's share of right guesses."""
    total, num_right, num_learned = 0.0, [0] * HEADS, [0] * HEADS
    for batch in batches:
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            states = teacher.hidden_states(batch)
            wanted = teacher.model.lm_head(states)
        loss = torch.zeros(())
        for head in range(HEADS):
            # The state at position p gives the token at p + 1; the head guesses the one that the state at p + 1 + head
            # gives. Both must belong to one document, and both tokens to its answer.
            ahead = 1 + head
            is_learned = (
                (batch.labels[:, 1:-ahead] >= 0)
                & (batch.labels[:, 1 + ahead :] >= 0)
                & (batch.owners[:, 1:-ahead] == batch.owners[:, 1 + ahead :])
            )
            with torch.autocast("cpu", dtype=torch.bfloat16):
                logits = teacher.model.lm_head(heads.guess(head, states[:, : -1 - ahead][is_learned]))
            right = wanted[:, ahead:-1][is_learned]
            loss = loss + distance(logits, right) / max(1, len(right)) / HEADS / len(batches)
            num_right[head] += int((logits.argmax(-1) == right.argmax(-1)).sum())
            num_learned[head] += len(right)
        loss.backward()
        total += loss.item()
    return [total, *(right / max(1, learned) for right, learned in zip(num_right, num_learned, strict=True))]


def main() -> None:
    """Train and export."""
    arguments = parse_arguments((__doc__ or "").partition("\n")[0], STEPS)
    teacher = Teacher(arguments.model, arguments.seed)
    heads = Heads(teacher.model.config.hidden_size)
    optimizer = AdamW(heads.parameters(), lr=RATE, weight_decay=0.0)
    progress = Progress(arguments.steps)
    for step in range(arguments.steps):
        for group in optimizer.param_groups:
            group["lr"] = RATE * (1.0 - step / arguments.steps)
        progress.add(step, *train_step(heads, teacher, teacher.batches(step)))
        nn.utils.clip_grad_norm_(heads.parameters(), MAX_GRADIENT)
        optimizer.step()
        optimizer.zero_grad()
    arguments.out.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().to(torch.bfloat16) for name, tensor in heads.state_dict().items()}
    save_file(tensors, arguments.out / WEIGHTS)
    config = {"medusa_num_heads": HEADS, "medusa_num_layers": 1, "original_lm_head": True}
    (arguments.out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
