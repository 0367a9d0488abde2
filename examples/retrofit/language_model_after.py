"""A character language model on a stream of text, with gradients accumulated over batches.

The text is what scikit-learn says about its own data sets: some 20,000 characters of English.
"""

import argparse
import math
import random

import ddp_utils as ddp
import torch
from sklearn import datasets
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import IterableDataset

LENGTH = 32


def load_text():
    loaders = (datasets.load_breast_cancer, datasets.load_wine, datasets.load_iris)
    loaders += (datasets.load_digits, datasets.load_diabetes, datasets.load_linnerud)
    text = "\n".join(load().DESCR for load in loaders)
    letters = sorted(set(text))
    return torch.tensor([letters.index(letter) for letter in text]), len(letters)


class Windows(IterableDataset):
    """Windows of ``LENGTH`` characters and the one after them, as a stream from some disk."""

    def __init__(self, text, shuffle):
        self.text = text
        self.shuffle = shuffle

    def __iter__(self):
        starts = list(range(0, len(self.text) - LENGTH - 1, LENGTH))
        if self.shuffle:
            random.shuffle(starts)
        for start in starts:
            yield self.text[start : start + LENGTH + 1]


class Model(nn.Module):
    def __init__(self, letters):
        super().__init__()
        self.embed = nn.Embedding(letters, 32)
        self.rnn = nn.GRU(32, 64, batch_first=True)
        self.head = nn.Linear(64, letters)

    def forward(self, text):
        return self.head(self.rnn(self.embed(text))[0])


def loss_of(model, windows):
    logits = model(windows[:, :-1])
    return cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


@torch.no_grad()
def evaluate(model, loader, device):
    model.eval()
    total = count = 0
    for windows in loader:
        total += loss_of(model, windows.to(device)).item() * len(windows)
        count += len(windows)
    total, count = ddp.all_reduce_sum((total, count))
    return math.exp(total / count)


@ddp.distributed_main
def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--accumulate", type=int, default=4)
    parser.add_argument("--lr", type=float, default=1e-2)
    args = parser.parse_args()

    ddp.seed_everything(0)
    device = ddp.get_device()
    text, letters = load_text()
    cut = len(text) * 9 // 10
    train_loader = ddp.make_loader(
        Windows(text[:cut], shuffle=True), global_batch_size=args.batch_size, pad=True
    )
    test_loader = ddp.make_loader(Windows(text[cut:], shuffle=False), args.batch_size)
    model = ddp.wrap_ddp(Model(letters))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    for epoch in range(1, args.epochs + 1):
        model.train()
        total_loss = steps = 0
        for step, windows in enumerate(train_loader):
            with ddp.accumulate(model, step, args.accumulate) as window:
                loss = loss_of(model, windows.to(device))
                (loss * window.scale).backward()
            if window.is_last:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            total_loss += loss.item()
            steps += 1
        loss = ddp.all_reduce_mean(total_loss / steps)
        perplexity = evaluate(model, test_loader, device)
        ddp.rank_zero_print(f"epoch {epoch}: loss {loss:.4f}, test perplexity {perplexity:.3f}")


if __name__ == "__main__":
    main()
