"""Reward functions of your own. They run in processes of their own, with a time limit (see custom_reward.yaml)."""


def close(response: str, answer: str, scale: float = 10.0) -> float:
    """Partial credit for a number near the answer: 1 when it is the answer, falling to 0 at a distance of `scale`.

    A function takes what it names: prompt, response, answer, extra, messages. Everything else comes from `params`.
    """
    try:
        distance = abs(float(response) - float(answer))
    except ValueError:  # the response is no number
        return 0.0
    return max(0.0, 1.0 - distance / scale)


def unlike_the_others(responses: list[str]) -> list[float]:
    """With the plural names a function sees the whole step in one call: here, the share of responses with another text."""
    return [1.0 - responses.count(response) / len(responses) for response in responses]
