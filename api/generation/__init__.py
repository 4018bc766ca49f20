"""From a request to its answer: prompts, adapters and grammars in, sequences on the engine, chunks or one body out."""
