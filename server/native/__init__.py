"""SGLang's native endpoints and the operational ones."""
