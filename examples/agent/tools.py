"""Two tools, and what an episode is worth: `rollout-worker --tools examples.agent.tools` makes them `tools`."""

from __future__ import annotations

from rollout.tools.environment import Episode

TEMPERATURES = {"paris": 18, "rome": 24, "oslo": 7}


def temperature(city: str) -> dict[str, str | int]:
    """The temperature in a city now, in degrees Celsius.

    Args:
        city: name of the city, such as Paris
    """
    if city.lower() not in TEMPERATURES:
        raise ValueError(f"no station in {city}")
    return {"city": city, "celsius": TEMPERATURES[city.lower()]}


def fahrenheit(celsius: float) -> float:
    """Convert a temperature.

    Args:
        celsius: degrees Celsius
    """
    return celsius * 9 / 5 + 32


def reward(episode: Episode) -> dict[str, float]:
    """Half for calls that worked, half for the right number in the answer."""
    worked = sum(result.problem is None for result in episode.results)
    right = str(episode.context.metadata["answer"]) in episode.answer
    return {"calls": 0.5 * worked / max(1, len(episode.results)), "answer": 0.5 * right}
