"""SGLang's native endpoints and its endpoints for operators."""
