"""Tables and the plot of `benchmarks/convolutions.py`."""


def peak_of(results):
    return max(results["peak_gflop_per_s"].values())


def table(header, rows):
    return "\n".join(
        ["| " + " | ".join(header) + " |", "| " + " | ".join("---" for _ in header) + " |"]
        + ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    )


def markdown(results):
    """Returns the tables of layers, options and the whole network."""
    return "\n\n".join([layers_table(results), options_table(results), network_table(results)])


def layers_table(results):
    names = list(results["layers"][0]["results"])
    shares = [name for name in ("without YNNPACK", "PyTorch") if name in names]
    header = [
        "layer",
        "pass",
        *(f"{name}, ms" for name in names),
        *(f"of the peak, {name}" for name in shares),
    ]
    peak = peak_of(results)
    rows = []
    for row in results["layers"]:
        cells = [f"{row['results'][name]['ms']:.3f}" for name in names]
        part = [f"{row['results'][name]['gflop_per_s'] / peak:.0%}" for name in shares]
        rows.append([row["layer"], row["pass"], *cells, *part])
    return table(header, rows)


def options_table(results):
    rows = []
    for row in results["options"]:
        if "error" in row:
            rows.append(
                [row["option"], "refused: " + row["error"].splitlines()[0][:100], "", "", ""]
            )
        else:
            times = [f"{result['ms']:.3f}" for result in row["results"].values()]
            rows.append(
                [
                    row["option"],
                    "same program" if row["same_program"] else "another program",
                    *times,
                ]
            )
    return table(["option", "accepted", "forward, ms", "input gradient", "kernel gradient"], rows)


def network_table(results):
    pages = results["network"]
    by_page = {kind: {row["what"]: row for row in rows} for kind, rows in pages.items()}
    rows = []
    for what in next(iter(by_page.values())):
        cells = []
        for kind in pages:
            row = by_page[kind][what]
            cells += [
                "{:.1f} ({:.1f} to {:.1f})".format(row["ms"], *row["range_ms"]),
                row["page_faults"],
            ]
        rows.append([what, *cells])
    return table(
        ["ResNet-20", *(cell for kind in pages for cell in (f"{kind}, ms", "page faults"))], rows
    )


def draw(results, path):
    """Draws GFLOP/s of each layer and pass, beside the peak of a matmul."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    passes = list(dict.fromkeys(row["pass"] for row in results["layers"]))
    shown = [
        name
        for name in ("XLA", "without YNNPACK", "sum of matmuls", "PyTorch")
        if name in results["layers"][0]["results"]
    ]
    figure, axes = plt.subplots(
        len(passes), 1, figsize=(11, 3 * len(passes)), sharex=True, layout="constrained"
    )
    for axis, name in zip(axes, passes, strict=True):
        rows = [row for row in results["layers"] if row["pass"] == name]
        for index, contender in enumerate(shown):
            places = [
                position + (index - len(shown) / 2 + 0.5) * 0.2 for position in range(len(rows))
            ]
            axis.bar(
                places,
                [row["results"][contender]["gflop_per_s"] for row in rows],
                0.2,
                label=contender,
            )
        axis.axhline(peak_of(results), color="black", linewidth=1, label="product of 1024 x 1024")
        axis.set_ylabel(f"{name}\nGFLOP/s")
    figure.legend(
        *axes[0].get_legend_handles_labels(),
        loc="outside upper center",
        ncols=len(shown) + 1,
        fontsize=8,
    )
    axes[-1].set_xticks(
        range(len(rows)),
        [row["layer"].replace(", ", "\n").replace(" ", "\n", 1) for row in rows],
        fontsize=6,
    )
    figure.savefig(path, dpi=110)
    plt.close(figure)
