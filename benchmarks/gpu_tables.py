"""Write the tables of ``docs/performance.md`` from ``results`` (``python -m benchmarks.gpu_tables``); ``--check`` compares.

``--take FOLDER COMMIT`` first copies what the calls on a rented machine brought back: that machine has no git.
"""

import argparse
import json
import re
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.facts import RESULTS
from benchmarks.tables import COLUMNS, write_page

PAGE = Path(__file__).parents[1] / "docs" / "performance.md"
_SECTION = re.compile(r"(<!-- h100 -->\n).*?(<!-- end of h100 -->)", re.DOTALL)
_PREFIX = "gpu_h100_"
_BACKENDS = {"flashinfer": "FlashInfer", "triton": "Triton"}
_PLACES = {"cuda": "device", "cpu": "host"}

Row = dict[str, Any]


def main(arguments: Sequence[str], page: Path = PAGE, results: Path = RESULTS) -> int:
    """Write the page, or with ``--check`` only compare; return 1 if it does not match the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare only")
    parser.add_argument(
        "--take", nargs=2, metavar=("FOLDER", "COMMIT"), help="copy the results of a call first"
    )
    given = parser.parse_args(arguments)
    if given.take:
        take(Path(given.take[0]), given.take[1], results)
    text = page.read_text()
    expected = _SECTION.sub(lambda match: match[1] + "\n" + tables(results) + "\n" + match[2], text)
    return write_page(page, expected, "benchmarks.gpu_tables", is_check=given.check)


def take(folder: Path, commit: str, results: Path) -> None:
    """Copy each part's results, with the commit, which the machine had no record of, and without the many samples."""
    for source in sorted(folder.glob("gpu_*.json")):
        found = json.loads(source.read_text())
        rows = [{name: value for name, value in row.items() if name != "samples_ms"} for row in found["rows"]]
        target = results / (_PREFIX + source.name.removeprefix("gpu_"))
        target.write_text(json.dumps({**found, "commit": commit, "rows": rows}, indent=1) + "\n")


def tables(results: Path) -> str:
    """Return all tables, each with the date and commit of its figures."""
    return "\n".join(_table(name, write, results) for name, write in _WRITERS.items())


def _table(name: str, write: Callable[[list[Row]], list[str]], results: Path) -> str:
    path = results / f"{_PREFIX}{name}.json"
    if not path.exists():
        return f"`{name}`: not measured.\n"
    found = json.loads(path.read_text())
    ceilings = found["ceilings"]
    origin = (
        f"`{name}`, {found['date']}, commit {found['commit']}; bounds by a copy of {ceilings['copy'] / 1e12:.2f} TB/s "
        f"and a bfloat16 product of {ceilings['matmul'] / 1e12:.0f} TFLOP/s:"
    )
    wrapped = textwrap.fill(origin, COLUMNS, break_on_hyphens=False) + "\n"
    return "\n".join([wrapped, *write(found["rows"]), ""])


def _decode(rows: list[Row]) -> list[str]:
    """Leave steps without graphs out, which take the time of their launches."""
    lines = _head("decode, context 1,024", "requests", *_BACKENDS.values())
    rows = [row for row in rows if row["graphs"]]
    for way in dict.fromkeys(_way(row) for row in rows):
        own = [row for row in rows if _way(row) == way]
        for batch in sorted({row["batch"] for row in own}):
            cells = [_share(own, backend=backend, batch=batch) for backend in _BACKENDS]
            if any(cells):
                lines.append(_line(way, str(batch), *cells))
    return lines


def _way(row: Row) -> str:
    name = f"{row['model']}, {'drawn' if row['temperature'] else 'greedy'}"
    return name + (", runs ahead" if row.get("runs_ahead") else "")


def _small_batch(rows: list[Row]) -> list[str]:
    columns = ["requests", "cuBLAS: ms, share of the bound", "our kernels: ms, share of the bound"]
    columns += ["difference of logits", "from float32: cuBLAS, our kernels"]
    lines = _head("products of small batches, Triton attention, graphs, greedy, runs ahead", *columns)
    for row in rows:
        before = _figure(row["ms_before"], row["share_before"])
        ours = _figure(row["ms"], row["share_of_bound"])
        errors = f"{row['error_before']:.3f}, {row['error']:.3f}" if "error" in row else "not measured"
        difference = f"{row['relative_difference_of_logits']:.3f}"
        lines.append(_line(row["model"], str(row["batch"]), before, ours, difference, errors))
    return lines


def _draws(rows: list[Row]) -> list[str]:
    lines = _head("drawing tokens by our kernels", "requests × vocabulary", "µs")
    for row in rows:
        if "us" in row and row.get("way", "ours") == "ours":
            limits = f"top-p {row['top_p']}" + (f", top-k {row['top_k']}" if row["top_k"] else "")
            name = f"logits {row['logits']}, temperature {row['temperature']}, {limits}, {row['dtype']}"
            lines.append(_line(name, f"{row['requests']} × {row['vocabulary']:,}", f"{row['us']:.0f}"))
    return lines


def _steps(title: str) -> Callable[[list[Row]], list[str]]:
    def write(rows: list[Row]) -> list[str]:
        lines = _head(title, *_BACKENDS.values())
        rows = [{"num_tokens": row["length"], "batch": 8, **row} for row in rows]
        for model, batch, count in dict.fromkeys(
            (row["model"], row["batch"], row["num_tokens"]) for row in rows
        ):
            cells = [
                _share(rows, backend=backend, model=model, batch=batch, num_tokens=count)
                for backend in _BACKENDS
            ]
            lines.append(_line(f"{model}, {batch} × {count:,} tokens", *cells))
        return lines

    return write


def _reads(rows: list[Row]) -> list[str]:
    lines = _head("NIXL alone, 128 × 2 MiB, two processes", "chosen by UCX", "GB/s")
    for row in rows:
        chosen = next(iter(row["protocols"].values()))[0].split(": ", 1)[1]
        option = (
            ""
            if row["source"] == "cpu"
            else f", `UCX_CUDA_IPC_ENABLE_GET_ZCOPY={'y' if row['get_zcopy'] else 'n'}`"
        )
        name = f"{_PLACES[row['source']]} → {_PLACES[row['target']]}{option}"
        lines.append(_line(name, chosen, f"{row['bytes_per_second'] / 1e9:.1f}"))
    return lines


def _service(rows: list[Row]) -> list[str]:
    lines = _head("answers of `kvbaton up` on the device and on the CPU, float32", "equal", "tokens")
    for row in rows:
        equal = row.get("error") or f"{row['equal_answers']} of {row['answers']}"
        lines.append(_line(f"{row['model']}, {row['transport']}", equal, str(row.get("tokens", ""))))
    return lines


def _handover(rows: list[Row]) -> list[str]:
    names = ["prefill", "transfer_exposed", "gap_token_0_to_1", "inter_token_latency"]
    titles = ["prefill ms", "exposed transfer ms", "gap before token 2, ms", "between tokens, ms"]
    lines = _head("hand-over of 2,048 tokens, `up --prefill 1 --decode 1` on one card", *titles)
    for row in rows:
        name = f"{row['model']}, {row['transport']}" + (
            ", into larger blocks" if row.get("is_converted") else ""
        )
        cells = (
            ["failed", "", "", ""]
            if "error" in row
            else [f"{row['medians'][each] * 1e3:.1f}" for each in names]
        )
        lines.append(_line(name, *cells))
    return lines


_WRITERS: dict[str, Callable[[list[Row]], list[str]]] = {
    "small_batch": _small_batch,
    "decode": _decode,
    "decode_llama": _decode,
    "decode_qwen": _decode,
    "fp8": _decode,
    "draws": _draws,
    "prefill": _steps("prefill, requests × tokens"),
    "long": _steps("requests × tokens behind 65,536 tokens of context"),
    "reads": _reads,
    "handover": _handover,
    "handover_before": _handover,
    "service": _service,
}


def _share(rows: list[Row], **wanted: Any) -> str:
    for row in rows:
        if all(row[name] == value for name, value in wanted.items()):
            return _figure(row["ms"], row["share_of_bound"])
    return ""


def _figure(milliseconds: float, share: float) -> str:
    return f"{milliseconds:.2f}, {share:.0%}".replace("%", " %")


def _head(title: str, *columns: str) -> list[str]:
    unit = " ms, share of the bound"
    names = [column + ":" + unit if column in _BACKENDS.values() else column for column in columns]
    return [_line(title, *names), _line("--", *("-:" for _ in columns))]


def _line(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
