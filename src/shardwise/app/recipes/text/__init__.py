"""What language models train on: text, tokens, streams of documents."""
