"""Image classification in the layout that many public scripts have: train(), test(), main()."""

import argparse

import ddp_utils as ddp
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn, optim
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import Dataset, Subset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.dropout = nn.Dropout(0.25)
        self.fc1 = nn.Linear(32 * 4 * 4, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.fc1(self.dropout(x.flatten(1))))
        return F.log_softmax(self.fc2(x), dim=1)


class Digits(Dataset):
    """Handwritten digits, 8 x 8; shifted by up to a pixel where ``augment`` is set."""

    def __init__(self, augment):
        digits = load_digits()
        self.images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
        self.labels = torch.tensor(digits.target)
        self.augment = augment

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        image = self.images[index]
        if self.augment:
            down, right = torch.randint(-1, 2, (2,)).tolist()
            image = image.roll((down, right), dims=(1, 2))
        return image, self.labels[index]


def train(args, model, device, train_loader, optimizer, epoch):
    model.train()
    for batch_idx, (data, target) in enumerate(train_loader):
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad()
        loss = F.nll_loss(model(data), target)
        loss.backward()
        optimizer.step()
        if batch_idx % args.log_interval == 0:
            loss = ddp.all_reduce_mean(loss)
            ddp.rank_zero_print(f"epoch {epoch}, batch {batch_idx}: {loss.item():.4f}")
            if args.dry_run:
                break


def test(model, device, test_loader):
    model.eval()
    test_loss, correct = 0.0, 0
    with torch.no_grad():
        for data, target in test_loader:
            data, target = data.to(device), target.to(device)
            output = model(data)
            test_loss += F.nll_loss(output, target, reduction="sum").item()
            correct += output.argmax(dim=1).eq(target).sum().item()
    total = len(test_loader.dataset)
    test_loss, correct = ddp.all_reduce_sum((test_loss, correct))
    ddp.rank_zero_print(f"test: loss {test_loss / total:.4f}, accuracy {correct} of {total}")


@ddp.distributed_main
def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--test-batch-size", type=int, default=256)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--lr", type=float, default=1.0)
    parser.add_argument("--gamma", type=float, default=0.7)
    parser.add_argument("--no-accel", action="store_true")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log-interval", type=int, default=10)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--save-model", metavar="FILE")
    args = parser.parse_args()

    ddp.seed_everything(args.seed)
    device = torch.device("cpu") if args.no_accel else ddp.get_device()

    train_set = Subset(Digits(augment=True), range(1440))
    test_set = Subset(Digits(augment=False), range(1440, 1797))
    workers = {"num_workers": args.workers}
    train_loader = ddp.make_loader(
        train_set, global_batch_size=args.batch_size, shuffle=True, **workers
    )
    test_loader = ddp.make_loader(test_set, args.test_batch_size, **workers)

    model = ddp.wrap_ddp(Net().to(device))
    optimizer = optim.Adadelta(model.parameters(), lr=args.lr)
    scheduler = StepLR(optimizer, step_size=1, gamma=args.gamma)
    for epoch in range(1, args.epochs + 1):
        train(args, model, device, train_loader, optimizer, epoch)
        test(model, device, test_loader)
        scheduler.step()

    if args.save_model:
        ddp.rank_zero_only(torch.save)(ddp.unwrap(model).state_dict(), args.save_model)


if __name__ == "__main__":
    main()
