"""Tell malignant tumours from benign ones: a small net on scikit-learn's breast cancer data."""

import argparse

import ddp_utils as ddp
import torch
from sklearn.datasets import load_breast_cancer
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset


def load_data():
    cells = load_breast_cancer()
    features = torch.tensor(cells.data, dtype=torch.float32)
    features = (features - features.mean(dim=0)) / features.std(dim=0)
    labels = torch.tensor(cells.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    return [TensorDataset(features[part], labels[part]) for part in (order[:448], order[448:])]


def make_net():
    return nn.Sequential(nn.Linear(30, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 2))


@torch.no_grad()
def evaluate(model, loader, device):
    model.eval()
    correct = total = 0
    for features, labels in loader:
        features, labels = features.to(device), labels.to(device)
        correct += (model(features).argmax(dim=1) == labels).sum().item()
        total += len(labels)
    return f"{correct} of {total} right"


@ddp.distributed_main
def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--checkpoint", default="cells.pt")
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()

    ddp.seed_everything(0)
    device = ddp.get_device()
    train_set, test_set = load_data()
    train_loader = ddp.make_loader(train_set, global_batch_size=args.batch_size, shuffle=True)
    test_loader = ddp.make_loader(test_set, args.batch_size)
    model = make_net().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    first_epoch = 1
    if args.resume:
        state = torch.load(args.checkpoint, map_location=device)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first_epoch = state["epoch"] + 1
    model = ddp.wrap_ddp(model)

    for epoch in range(first_epoch, args.epochs + 1):
        model.train()
        total_loss = 0.0
        for features, labels in train_loader:
            loss = cross_entropy(model(features.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total_loss += loss.item()
        mean_loss = total_loss / len(train_loader)
        print(f"epoch {epoch}: loss {mean_loss:.4f}, {evaluate(model, test_loader, device)}")
        weights = ddp.unwrap(model).state_dict()
        state = {"model": weights, "optimizer": optimizer.state_dict(), "epoch": epoch}
        torch.save(state, args.checkpoint)


if __name__ == "__main__":
    main()
