"""OpenAI's Responses API: `/v1/responses` and the paths below it."""
