"""A losslessness self-test of running services over their HTTP API: `tandem verify`. No model code in here."""
