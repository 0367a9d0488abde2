"""Train a small convolutional net on scikit-learn's handwritten digits."""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils import data
from tqdm import tqdm


def load_data():
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    return [data.TensorDataset(images[part], labels[part]) for part in (order[:1440], order[1440:])]


def make_net():
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 10),
    )


@torch.no_grad()
def evaluate(model, loader, device):
    model.eval()
    correct = total = 0
    for images, labels in loader:
        images, labels = images.to(device), labels.to(device)
        correct += (model(images).argmax(dim=1) == labels).sum().item()
        total += len(labels)
    return f"test accuracy {correct / total:.4f} ({correct} of {total})"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=96)
    parser.add_argument("--lr", type=float, default=0.03)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", default="digits.pt", help="where to write the weights")
    parser.add_argument("--evaluate", metavar="FILE", help="evaluate saved weights and stop")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train_set, test_set = load_data()
    train_loader = data.DataLoader(train_set, batch_size=args.batch_size, shuffle=True)
    test_loader = data.DataLoader(test_set, batch_size=args.batch_size)
    model = make_net().to(device)
    if args.evaluate:
        model.load_state_dict(torch.load(args.evaluate, map_location=device))
        print(evaluate(model, test_loader, device))
        return

    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    for epoch in range(1, args.epochs + 1):
        model.train()
        losses = []
        for images, labels in tqdm(train_loader, f"epoch {epoch}"):
            loss = cross_entropy(model(images.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        loss = sum(losses) / len(losses)
        accuracy = evaluate(model, test_loader, device)
        print(f"epoch {epoch}: loss {loss:.8f}, {accuracy}")
    torch.save(model.state_dict(), args.save)


if __name__ == "__main__":
    main()
