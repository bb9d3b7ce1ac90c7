"""Compiles the GPU kernels without a card and judges the machine code: `python -m kernels.gpu.aot [--archs 86] [WORD]`.

Every file of this folder that has `aot_cases()` takes part; WORDs keep the cases whose names hold one of them. Prints a
line a case and ends with exit code 1 if any breaks a rule: no stack and no spills, shared memory within the card's, and
for 4-bit products a main loop without conversions and without stores to shared memory, fed by 16-byte copies.
Runs in a process of its own: TRITON_INTERPRET must not be set.
"""

import argparse
import importlib
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from kernels import gpu
from kernels.gpu.cases import ARCHS, AotCase, WeightLoop

SHARED_LIMIT = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024}  # bytes that one block may have
_WARP = 32

_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)(.*?);")


@dataclass(frozen=True)
class Compiled:
    """What the compiler made of a case for one architecture. Instructions are (address, name, operands)."""

    registers: int
    stack: int
    shared: int
    instructions: tuple[tuple[int, str, str], ...]

    def main_loop(self) -> tuple[str, ...]:
        """Names in the loop that has the most matrix instructions; of nested ones, the shortest. Empty without one."""
        loops = [
            tuple(name for at, name, _ in self.instructions if target <= at <= address)
            for address, target in self._backward_branches()
        ]
        return max(loops, key=lambda loop: (_count_mma(loop), -len(loop)), default=())

    def _backward_branches(self) -> Iterator[tuple[int, int]]:
        for address, name, operands in self.instructions:
            if name.startswith("BRA") and (found := re.search(r"0x([0-9a-f]+)", operands)):
                target = int(found.group(1), 16)
                if target < address:
                    yield address, target


def _count_mma(names: Sequence[str]) -> int:
    return sum(name.startswith(("HMMA", "HGMMA", "IMMA", "IGMMA")) for name in names)


def compile_case(case: AotCase, arch: int) -> Compiled:
    """Raises what Triton raises."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = case.kernel.arg_names
    signature = {name: "constexpr" if name in case.constants else case.types[name] for name in names}
    aligned = {name for name in names if case.types.get(name, "").startswith("*")} | case.multiples_of_16
    attrs = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned if name not in case.constants}
    compiled = triton.compile(
        ASTSource(case.kernel, signature, dict(case.constants), attrs),
        target=GPUTarget("cuda", arch, _WARP),
        options={"num_warps": case.num_warps, "num_stages": case.num_stages, **case.options},
    )
    usage, sass = (_cuobjdump(option, compiled.asm["cubin"]) for option in ("--dump-resource-usage", "-sass"))
    registers, stack = (int(re.search(rf"{word}:(\d+)", usage)[1]) for word in ("REG", "STACK"))  # type: ignore[index]
    instructions = tuple((int(at, 16), name, operands) for at, name, operands in _INSTRUCTION.findall(sass))
    return Compiled(registers, stack, compiled.metadata.shared, instructions)


def _cuobjdump(option: str, cubin: bytes) -> str:
    """The tool lies in Triton's own package."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        return subprocess.run([tool, option, path], capture_output=True, text=True, check=True).stdout


def faults(case: AotCase, arch: int, compiled: Compiled) -> list[str]:
    """The rules that it breaks, in words with numbers."""
    found = []
    if compiled.stack:
        found.append(f"{compiled.stack} bytes of stack")
    if num_spills := sum(name.startswith(("STL", "LDL")) for _, name, _ in compiled.instructions):
        found.append(f"{num_spills} instructions that spill registers")
    if compiled.shared > SHARED_LIMIT[arch]:
        found.append(f"{compiled.shared:,} bytes of shared memory, the card has {SHARED_LIMIT[arch]:,}")
    return found + (_faults_of_loop(case.weight_loop, compiled) if case.weight_loop else [])


def _faults_of_loop(sizes: WeightLoop, compiled: Compiled) -> list[str]:
    loop = compiled.main_loop()
    if not _count_mma(loop):
        return ["no loop with matrix instructions"]
    found = []
    for prefix, meaning in (("I2F", "conversions of integers"), ("STS", "stores to shared memory")):
        if count := sum(name.startswith(prefix) for name in loop):
            found.append(f"{count} {meaning} in the main loop")
    if not any(name.startswith("LDGSTS") and ".128" in name for name in loop):
        found.append("no 16-byte asynchronous copies in the main loop")
    if (cost := instructions_a_weight(sizes, loop)) > sizes.max_instructions_a_weight:
        found.append(f"{cost:.2f} instructions a weight, {sizes.max_instructions_a_weight} allowed")
    return found


def instructions_a_weight(sizes: WeightLoop, loop: Sequence[str]) -> float:
    """Lane-instructions of the loop for each weight that passes; the matrix instructions tell how many do."""
    num_wgmma = sum(name.startswith("HGMMA") for name in loop)
    weights = num_wgmma * sizes.weights_a_wgmma + (_count_mma(loop) - num_wgmma) * sizes.weights_a_mma
    return len(loop) * _WARP / weights


def all_cases() -> list[AotCase]:
    """Of every kernel file, in the files' order."""
    names = [module.name for module in pkgutil.iter_modules(gpu.__path__) if module.name not in ("aot", "cases")]
    modules = [importlib.import_module(f"kernels.gpu.{name}") for name in names]
    return [case for module in modules if hasattr(module, "aot_cases") for case in module.aot_cases()]


def _judge(place: int, arch: int) -> tuple[str, bool]:
    """The line of case number `place` (kernels do not travel between processes, numbers do), and whether it passed."""
    case = all_cases()[place]
    try:
        compiled = compile_case(case, arch)
    except Exception as error:  # a row that does not compile is a finding, and the others are still judged
        return f"FAIL  sm_{arch} {case.name}: {type(error).__name__}: {error}", False
    found = faults(case, arch, compiled)
    cost = f", {instructions_a_weight(case.weight_loop, compiled.main_loop()):.2f} a weight" if case.weight_loop else ""
    numbers = f"{compiled.registers} registers, {compiled.shared:,} bytes shared{cost}"
    line = f"{'FAIL' if found else 'ok':<5} sm_{arch} {case.name}: {numbers}"
    return "; ".join([line, *found]), not found


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m kernels.gpu.aot", description="Judges the GPU kernels' machine code."
    )
    parser.add_argument("words", nargs="*", help="keep the cases whose names hold one of these")
    parser.add_argument("--archs", default=",".join(map(str, ARCHS)), help="compute capabilities, such as 86,89")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes at once")
    return parser.parse_args()


def main() -> None:
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise SystemExit("TRITON_INTERPRET=1 is set: nothing would be compiled. Unset it.")
    arguments = _arguments()
    archs = [int(arch) for arch in arguments.archs.split(",")]
    cases = enumerate(all_cases())
    wanted = [(i, case) for i, case in cases if not arguments.words or any(w in case.name for w in arguments.words)]
    tasks = [(i, arch) for i, case in wanted for arch in archs if arch in case.archs]
    if not tasks:
        raise SystemExit(f"No case of {arguments.words or 'any file'} is for sm_{arguments.archs}.")
    passed = True
    with ProcessPoolExecutor(arguments.jobs) as pool:
        for line, is_good in pool.map(_judge, *zip(*tasks, strict=True)):
            print(line, flush=True)
            passed &= is_good
    print(f"{len(tasks)} compilations")
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()
