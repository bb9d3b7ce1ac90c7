"""The numbers that requests bring, with their limits: also as text, since clients send them so; never true or false."""

from typing import Annotated, Any

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

MAX_LOGPROBS = 20
# Tokens are counted below this: every JSON reader holds it exactly, and it is short enough to be said in a refusal.
COUNTS = 2**53


def _no_truth_value(value: Any) -> Any:
    """true is 1 to Python; of a client it is a mistake."""
    if isinstance(value, bool):
        raise PydanticCustomError("number_type", "Input should be a number")
    return value


# The last word of every number: with limits after it, the schema loses them.
NUMBER = BeforeValidator(_no_truth_value)

Whole = Annotated[int, NUMBER]
Count = Annotated[int, Field(lt=COUNTS), NUMBER]
Positive = Annotated[int, Field(ge=1, lt=COUNTS), NUMBER]
TopK = Annotated[int, Field(ge=-1), NUMBER]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63), NUMBER]
Logprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS), NUMBER]
Temperature = Annotated[float, Field(ge=0, allow_inf_nan=False), NUMBER]
Probability = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False), NUMBER]
Repetition = Annotated[float, Field(gt=0, allow_inf_nan=False), NUMBER]
Penalty = Annotated[float, Field(ge=-2, le=2), NUMBER]
