"""A small GAN that draws digits: two models, two optimizers, three backward passes a step."""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import DataLoader, TensorDataset

NOISE = 16


def make_generator():
    return nn.Sequential(
        nn.Linear(NOISE, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 64), nn.Sigmoid()
    )


def make_discriminator():
    return nn.Sequential(nn.Linear(64, 128), nn.LeakyReLU(0.2), nn.Linear(128, 1))


def loss_of(logits, real):
    return binary_cross_entropy_with_logits(logits, torch.full_like(logits, float(real)))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--samples", default="samples.pt", help="where to write drawn digits")
    args = parser.parse_args()

    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    images = torch.tensor(load_digits().data, dtype=torch.float32) / 16
    loader = DataLoader(TensorDataset(images), args.batch_size, shuffle=True, drop_last=True)

    generator = make_generator().to(device)
    discriminator = make_discriminator().to(device)
    generator_optimizer = torch.optim.Adam(generator.parameters(), args.lr, betas=(0.5, 0.99))
    discriminator_optimizer = torch.optim.Adam(
        discriminator.parameters(), args.lr, betas=(0.5, 0.99)
    )
    for epoch in range(1, args.epochs + 1):
        totals = {"discriminator": 0.0, "generator": 0.0}
        for (real,) in loader:
            real = real.to(device)
            fake = generator(torch.randn(len(real), NOISE, device=device))

            discriminator_optimizer.zero_grad()
            on_real = loss_of(discriminator(real), real=True)
            on_real.backward()
            on_fake = loss_of(discriminator(fake.detach()), real=False)
            on_fake.backward()
            discriminator_optimizer.step()

            generator_optimizer.zero_grad()
            fooled = loss_of(discriminator(fake), real=True)
            fooled.backward()
            generator_optimizer.step()

            totals["discriminator"] += (on_real + on_fake).item()
            totals["generator"] += fooled.item()
        losses = {name: total / len(loader) for name, total in totals.items()}
        print(f"epoch {epoch}:", *(f"{name} {loss:.4f}" for name, loss in losses.items()))

        generator.eval()
        with torch.no_grad():
            drawn = generator(torch.randn(8, NOISE, device=device))
        generator.train()
        torch.save(drawn.cpu(), args.samples)


if __name__ == "__main__":
    main()
