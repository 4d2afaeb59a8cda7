"""Proof at start that a block's bytes lie where its geometry says: written through vLLM's tensors, read through the regions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pillion.geometry import Geometry, GeometryError, split_pages

if TYPE_CHECKING:
    import torch


def prove(layers: list[tuple[str, torch.Tensor]], geometry: Geometry, blocks: int) -> None:
    """Fills one block of every layer with random bytes, finds all of them in order, and clears them. No KV is there yet."""
    import torch

    # As plain words: some of the KV's data types cannot be copied, and their NaNs need not survive it.
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    block = blocks - 1
    expected, pages = [], []
    for name, tensor in layers:
        split, block_axis = split_pages(name, tensor, blocks)
        page = split.select(block_axis, block)
        page = page.permute(sorted(range(page.dim()), key=page.stride, reverse=True)).view(words[page.element_size()])
        pattern = torch.randint(256, (page.numel() * page.element_size(),), dtype=torch.uint8, device=page.device)
        page.copy_(pattern.view(page.dtype).view(page.shape))
        expected.append(pattern)
        pages.append(page)
    memory = [torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage) for storage in geometry.storages]
    found = [
        memory[storage][offset + block * stride : offset + block * stride + length]
        for storage, offset, stride, length in geometry.regions
    ]
    right = torch.equal(torch.cat(found), torch.cat(expected))
    for page in pages:
        page.zero_()
    if not right:
        raise GeometryError(
            "a block's bytes do not lie where the strides of vLLM's KV tensors say; please report the model and vLLM's version"
        )
