"""What every client library is asked to do: a tool to call, and a Pydantic model to fill.

Both are narrow, so that a model of 135 million parameters is done soon.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

QUESTION = "How is the weather in Bonn?"


class City(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: Literal["Bonn", "Köln"]
    river: Literal["Rhein"]


def weather(city: Literal["Bonn", "Köln"]) -> str:
    """Tells the weather of a city."""
    return f"It rains in {city}."


WEATHER_SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Bonn", "Köln"]}},
    "required": ["city"],
    "additionalProperties": False,
}
