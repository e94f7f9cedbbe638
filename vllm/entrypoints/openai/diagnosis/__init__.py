"""Why a prompt parted from an earlier one: fingerprints of requests, and what differs."""
