"""An agent of the user's own: it asks for a sum through the OpenAI client, and says no to a wrong answer once.

exactrl train experiment=tiny_agent
"""


async def run(session, row, again="No. Try again.", late=0.5):
    """Play one episode; the return value is the reward of the last turn.

    Args:
        session: has `client` (an `openai.AsyncOpenAI` with this episode's address and key), `model`, `set_reward`, and more.
        row: has `id`, `source`, `prompt`, `messages`, `answer`, `extra` of the data's row.
        again: what a wrong answer is told.
        late: what a right second answer is worth.
    """
    messages = list(row.messages)
    for worth in (1.0, late):
        reply = await session.client.chat.completions.create(model=session.model, messages=messages)
        answer = reply.choices[0].message
        if (answer.content or "").strip() == row.answer:
            return worth
        messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": again}]
    return 0.0
