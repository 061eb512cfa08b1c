"""An image classifier: a small CNN with batch norm, random flips, and accuracy on a validation set."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Images(Dataset):
    def __init__(self, count, train):
        generator = torch.Generator().manual_seed(count)
        self.labels = torch.randint(0, 3, (count,), generator=generator)
        self.images = torch.randn(count, 3, 12, 12, generator=generator) + self.labels.view(-1, 1, 1, 1)
        self.train = train

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        image = self.images[index]
        if self.train and torch.rand(()) < 0.5:
            image = image.flip(-1)
        return image, self.labels[index]


class CNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(inplace=True),
            nn.AdaptiveAvgPool2d(1),
        )
        self.classifier = nn.Linear(16, 3)

    def forward(self, x):
        x = self.features(x)
        return self.classifier(torch.flatten(x, 1))


def evaluate(model, loader):
    model.eval()
    correct = 0
    with torch.no_grad():
        for images, labels in loader:
            correct += (model(images).argmax(1) == labels).sum().item()
    return correct / len(loader.dataset)


def run(wrap):
    torch.manual_seed(0)
    model = wrap(CNN())
    train_loader = DataLoader(Images(23, train=True), batch_size=6, shuffle=True)
    valid_loader = DataLoader(Images(11, train=False), batch_size=4)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    history = []
    for _ in range(2):
        model.train()
        for images, labels in train_loader:
            optimizer.zero_grad()
            loss = criterion(model(images), labels)
            loss.backward()
            optimizer.step()
            history.append(loss.item())
        history.append(evaluate(model, valid_loader))
    return history
