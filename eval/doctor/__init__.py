"""Whether a server of OpenAI's protocol answers as the reference does; see `eval.doctor.command`."""
