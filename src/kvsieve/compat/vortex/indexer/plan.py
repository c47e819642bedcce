"""The plan of a decode step: page lists of every segment, what attention will read, what is scored."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvsieve.compat.vortex.abs.tensor import plain
from kvsieve.compat.vortex.core.errors import OpError
from kvsieve.compat.vortex.core.work import Work, remember_indptr


@dataclass(frozen=True)
class StepShape:
    """The sizes of a step, known on the host.

    ``pages``, ``kept``, ``items`` per request: pages, pages attended, work items of each of its ``heads`` segments.
    """

    lengths: list[int]
    page_size: int
    heads: int
    topk: int
    bos: int
    eos: int
    max_chunk: int

    def __post_init__(self) -> None:
        numbers = {
            "page_size": (self.page_size, 1),
            "num_kv_heads": (self.heads, 1),
            "topk_val": (self.topk, 0),
            "page_reserved_bos": (self.bos, 0),
            "page_reserved_eos": (self.eos, 0),
            "max_chunk_size": (self.max_chunk, 1),
        }
        for name, (value, least) in numbers.items():
            if value < least:
                problem = f"expected at least {least}, received {value}"
                raise OpError(f"plan_decode: {name}", problem, "assign it to the context before planning")

    @property
    def pages(self) -> list[int]:
        return [-(-length // self.page_size) for length in self.lengths]

    @property
    def kept(self) -> list[int]:
        return [min(self.topk + self.bos + self.eos, pages) for pages in self.pages]

    @property
    def widths(self) -> list[int]:
        """Pages that are scored; 0 where all pages fit the budget."""
        widths = [pages - self.bos - self.eos for pages in self.pages]
        return [width if width > self.topk else 0 for width in widths]

    @property
    def items(self) -> list[int]:
        return [-(-width // self.max_chunk) for width in self.widths]

    def per_segment(self, values: list[int]) -> list[int]:
        """Numbers of requests as numbers of segments."""
        return [value for value in values for _ in range(self.heads)]


def indptr(counts: list[int]) -> list[int]:
    """Prefix sums from 0 on."""
    sums = [0]
    for count in counts:
        sums.append(sums[-1] + count)
    return sums


@dataclass(frozen=True)
class Listing:
    """A flat list of segments' entries: ``segment`` [n] and ``place`` [n] (the entry's number in its segment)."""

    segment: torch.Tensor
    place: torch.Tensor

    @classmethod
    def of(cls, counts: list[int], device: torch.device) -> Listing:
        total, sent = sum(counts), send(counts, device)
        segment = torch.repeat_interleave(torch.arange(len(counts), device=device), sent, output_size=total)
        first = torch.cumsum(sent, 0) - sent
        return cls(segment, torch.arange(total, device=device) - first[segment])


def send(values: list[int], device: torch.device) -> torch.Tensor:
    """Host integers on a device, int64; a CUDA copy is queued, never waited for."""
    tensor = torch.tensor(values, dtype=torch.int64)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def page_rows(step: StepShape, dense: Listing, req_to_token: torch.Tensor, req_indices: torch.Tensor) -> torch.Tensor:
    """Pool rows of all pages in the dense listing, int64: ``(slot of the page's first token // p) * heads + head``."""
    request = req_indices.long()[dense.segment // step.heads]
    slots = req_to_token[request, dense.place * step.page_size].long()
    return slots // step.page_size * step.heads + dense.segment % step.heads


def sparse_rows(step: StepShape, dense_rows: torch.Tensor, old: torch.Tensor, device: torch.device) -> torch.Tensor:
    """What attention reads: all pages of a segment under budget; else its first and last ones, the middle as it was."""
    sparse = Listing.of(step.per_segment(step.kept), device)
    pages, kept = (send(step.per_segment(values), device)[sparse.segment] for values in (step.pages, step.kept))
    begin = send(indptr(step.per_segment(step.pages))[:-1], device)[sparse.segment]
    at_end = sparse.place >= kept - step.eos
    place = torch.where((pages > kept) & at_end, pages - kept + sparse.place, sparse.place)
    known = (pages == kept) | at_end | (sparse.place < step.bos)
    return torch.where(known, dense_rows[begin + place], old.long())


@dataclass(frozen=True)
class WorkItems:
    """The work list: row of q, offset in the dense listing and number of pages of every item, int64."""

    q: torch.Tensor
    offsets: torch.Tensor
    lens: torch.Tensor

    @classmethod
    def of(cls, step: StepShape, device: torch.device) -> WorkItems:
        items = Listing.of(step.per_segment(step.items), device)
        begin = send(indptr(step.per_segment(step.pages))[:-1], device)[items.segment]
        width = send(step.per_segment(step.widths), device)[items.segment]
        done = items.place * step.max_chunk
        return cls(items.segment, begin + step.bos + done, torch.clamp(width - done, max=step.max_chunk))


@dataclass
class Outputs:
    """The planner's output tensors, changed in place, by name; only as much as a step needs is written."""

    tensors: dict[str, torch.Tensor]

    def check(self, needed: dict[str, int]) -> None:
        """Refuse tensors that are too small, before anything is written."""
        for name, size in needed.items():
            if self.tensors[name].numel() < size:
                problem = f"expected room for {size} elements, received {self.tensors[name].numel()}"
                raise OpError(f"plan_decode: {name}", problem, "allocate it for the largest step, or leave it unset")

    def old(self, name: str, size: int) -> torch.Tensor:
        """The first elements as they are."""
        return plain(self.tensors[name]).view(-1)[:size].clone()

    def write(self, name: str, values: torch.Tensor) -> None:
        """The first elements."""
        plain(self.tensors[name]).view(-1)[: len(values)] = values.to(self.tensors[name].dtype)


def write_plan(step: StepShape, out: Outputs, req_to_token: torch.Tensor, req_indices: torch.Tensor) -> None:
    """Fill the outputs for a step."""
    device = out.tensors["dense_kv_indices"].device
    pages, kept = step.per_segment(step.pages), step.per_segment(step.kept)
    count = sum(step.per_segment(step.items))
    segments = len(pages)
    out.check(
        {
            **dict.fromkeys(("dense_kv_indptr", "sparse_kv_indptr"), segments + 1),
            **dict.fromkeys(("winfo_q_indices", "winfo_kv_offsets", "winfo_kv_lens"), count),
            **dict.fromkeys(("winfo_num_workloads", "winfo_chunk_size"), 1),
            "kv_last_page_len": segments,
            "dense_kv_indices": sum(pages),
            "sparse_kv_indices": sum(kept),
        }
    )
    dense = page_rows(step, Listing.of(pages, device), req_to_token.to(device), req_indices.to(device))
    last = [(length - 1) % step.page_size + 1 if length else 0 for length in step.lengths]
    items = WorkItems.of(step, device)
    out.write("dense_kv_indptr", send(indptr(pages), device))
    out.write("sparse_kv_indptr", send(indptr(kept), device))
    out.write("dense_kv_indices", dense)
    out.write("sparse_kv_indices", sparse_rows(step, dense, out.old("sparse_kv_indices", sum(kept)), device))
    out.write("kv_last_page_len", send(step.per_segment(last), device))
    out.write("winfo_q_indices", items.q)
    out.write("winfo_kv_offsets", items.offsets)
    out.write("winfo_kv_lens", items.lens)
    out.write("winfo_num_workloads", send([count], device))
    out.write("winfo_chunk_size", send([step.max_chunk], device))
    work = Work.of_items(items.offsets, items.lens, sum(step.per_segment(step.widths)))
    work.remember(*(out.tensors[name] for name in ("winfo_kv_offsets", "winfo_kv_lens", "winfo_num_workloads")))
    remember_indptr(out.tensors["dense_kv_indptr"], indptr(pages))
