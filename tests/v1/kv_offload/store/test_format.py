"""A folder as format 1 was written: who changes a byte of it gives the format another number."""

import base64
import json
import zlib
from pathlib import Path

import pytest

from vllm.v1.kv_offload.store.cells import ObjectKind
from vllm.v1.kv_offload.store.file_calls import DiskFiles
from vllm.v1.kv_offload.store.folder import FORMAT, CacheFolder, Identity, rows_path
from vllm.v1.kv_offload.store.rows_file import RowsFile

# Files by name, as hex: JSON, zlib, base 85.
_FORMAT_1 = (
    "c-rmS&u-&X6u{wEsk|OB_m6$9-5m>7h|Rn~5<3zLKpK!hLcBXCO$UjJ5iF=w(D(gxn)o``b{5(7*J)k0qpc;DxnIVy*7"
    "x6jzaPI$j}KD;000000000000000000000000000000000000000000000004mhf$P4XV;pVUO6#pGrT&BN`t8rQ*8Zm"
    "pw$I$Cz0&hPd+qxG000000000000000000000000000000000000000000000008i|oz{7q=V<HYyq5WLl=ipP+rCyxz"
    "rFU${rC_4#SPl?Ykj3JFkT#g?*0G(0000000000000000Pu!Q?;fUg*^aiBSmu5i$6DWicl>mk9v`N@^cHjPQKR)O@-<"
    "iHh`#3W61A0aZY?6Nqs1O|%&qlPE4{W$D|u#%IhHua9NU=3c0YUDGe)j&F=Ea2eqX<>=IqaVucO@d=DfJ-=yA!j^Ky+g"
    "^188nx<a3O>06Jnm(yQ<v5!Ce{Noqp_SH(2BuSDaNs=T<k|arzB<a83w(RS<p3A8oW#5i#Iq%21#AWYs8cW;!rz8LX00"
    "02+<~8ZxulDs=&eygqeOZoH+q{;oN7?psJJwkI@Bjb+0000000000000000000000000000000000000000000000000"
    "000000000000000000000000000000000000000000000000000000000000000000000000001Z4b!`a>6<S<eErpj>"
    "G5HT=+T#`F~{7uJnGS+=DXInth6%DtwqFjwAiDLxwU?3rPp?8r9G|1h%Neky|oc>$@bh?a?g@`x3RX8H>x>nEUn%5=Gk"
    "jrcmA}qm#1pZ?S0RgbC#UQ898fCK2<(p$tTQf=HzE0Ka<a1pLXABIX!32S#oaYM$VeE^_u%@?$77R$<O5e8j(-5m(%py"
    "?|18_dj"
)
_LIMIT = 2 << 20


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "cache"
    for name, data in json.loads(zlib.decompress(base64.b85decode(_FORMAT_1))).items():
        path = root / name
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.write_bytes(bytes.fromhex(data))
        path.chmod(0o600)
    root.chmod(0o700)
    return root


def read(root: Path, **parts: str) -> list[tuple[ObjectKind, bytes, int, int | None, bool, bytes]]:
    """Everything that an engine finds in a folder."""
    identity = Identity({"weights": "w", **parts}, 1, [5000])
    folder = CacheFolder(root, _LIMIT)
    assert folder.hash_root == bytes(range(32))
    store = folder.open_store(identity)
    store.opening.load()
    assert store.counts.damaged_cells == 0
    assert folder.notes == []
    handle = DiskFiles().open(rows_path(root / identity.name, 0))
    rows = RowsFile(DiskFiles(), handle, store.shape.slot_bytes)
    found = []
    for one in sorted(store.content.list_objects(), key=lambda one: one.position):
        key, data = one.extent.key, bytes(rows.read(one.extent))
        found.append((key.kind, key.digest, one.position, one.next_token, one.is_shared, data))
    DiskFiles().close(handle)
    folder.close()
    return found


def test_what_format_1_holds_is_found(root):
    assert FORMAT == 1
    written = [
        (ObjectKind.ROWS, bytes([1]) * 16, 768, None, False, bytes([1]) * 5000),
        (ObjectKind.STATE, bytes([2]) * 16, 800, 7, True, bytes([2]) * 300),
    ]
    assert read(root) == written
    # Another version finds nothing, and takes nothing away.
    assert read(root, numerics="version 9") == []
    assert read(root) == written
