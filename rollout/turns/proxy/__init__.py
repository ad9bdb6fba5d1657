"""The OpenAI-compatible address that agents speak to: requests by HTTP become turns of sessions."""
