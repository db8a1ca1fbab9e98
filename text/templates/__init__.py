"""What the model is shown: chat templates, the message forms that they take, and the proof that no message is lost."""
