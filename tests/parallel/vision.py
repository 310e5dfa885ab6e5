"""Small image models: a ResNet and a U-Net."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Residual(nn.Module):
    """A ResNet block: two convolutions with BatchNorm, and a skip connection that is downsampled with the block."""

    def __init__(self, channels: int, wider: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, wider, 3, stride, 1, bias=False), nn.BatchNorm2d(wider)
        self.conv2, self.bn2 = nn.Conv2d(wider, wider, 3, 1, 1, bias=False), nn.BatchNorm2d(wider)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module | None = None
        if stride != 1 or channels != wider:
            self.downsample = nn.Sequential(nn.Conv2d(channels, wider, 1, stride, bias=False), nn.BatchNorm2d(wider))

    def forward(self, x: Tensor) -> Tensor:
        skip = x if self.downsample is None else self.downsample(x)
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.bn2(self.conv2(x))
        x += skip
        result: Tensor = self.relu(x)
        return result


class ResNet(nn.Module):
    """A convolution and a pool, four layers of two blocks, global average pooling and a head."""

    def __init__(self, *, channels: int = 4, classes: int = 10) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, channels, 7, 2, 3, bias=False), nn.BatchNorm2d(channels)
        self.relu, self.maxpool = nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        self.layer1, self.layer2 = self._layer(channels, channels, 1), self._layer(channels, 2 * channels, 2)
        self.layer3, self.layer4 = (
            self._layer(2 * channels, 4 * channels, 2),
            self._layer(4 * channels, 8 * channels, 2),
        )
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(8 * channels, classes)

    @staticmethod
    def _layer(channels: int, wider: int, stride: int) -> nn.Sequential:
        return nn.Sequential(Residual(channels, wider, stride), Residual(wider, wider, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        result: Tensor = self.fc(torch.flatten(self.avgpool(x), 1))
        return result


class ConvUNet(nn.Module):
    """Downsamples twice and upsamples twice, with skip connections across."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.down1, self.down2 = (
            nn.Conv2d(3, 8, 3, 1, 1),
            nn.Conv2d(8, 16, 3, 2, 1),
            nn.Conv2d(16, 16, 3, 2, 1),
        )
        self.middle = nn.Sequential(nn.Conv2d(16, 16, 3, 1, 1), nn.GroupNorm(4, 16), nn.SiLU())
        self.up2, self.up1 = nn.ConvTranspose2d(16, 16, 2, 2), nn.ConvTranspose2d(32, 8, 2, 2)
        self.out, self.head = nn.Conv2d(16, 8, 3, 1, 1), nn.Sequential(nn.SiLU(), nn.Conv2d(8, 2, 1))

    def forward(self, x: Tensor) -> Tensor:
        first = F.silu(self.stem(x))
        second = F.silu(self.down1(first))
        x = self.up2(self.middle(self.down2(second)))
        x = self.up1(torch.cat([x, second], dim=1))
        result: Tensor = self.head(self.out(torch.cat([x, first], dim=1)))
        return result
