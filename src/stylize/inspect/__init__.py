"""Look inside: what the network sees in a picture, how the gradient flows, and how a run went.

    inspection.py  pictures in, report out: what `stylize inspect` does
    measure.py     pictures -> features, Gram matrices, errors and gradients, as plain numbers
    diagnosis.py   numbers -> sentences
    gradcam.py     where in a picture a number comes from
    drawing.py     numbers -> PNG (matplotlib)
    chapters.py    what the report says; report.py is its HTML
    record.py      the record of a run: a trace in JSON lines, and TensorBoard events
    plot.py        a trace -> curves (matplotlib)
    extra.py       is what an optional part needs installed?
"""
