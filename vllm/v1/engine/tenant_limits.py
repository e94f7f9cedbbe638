"""How much each tenant may ask for: requests and tokens a minute, requests that wait."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextvars import ContextVar
from hashlib import sha256

from vllm.config.tenants import Tenant, TenantsConfig
from vllm.exceptions import ConfigError, TenantLimitError

_MINUTE_S = 60.0

# Whose request is being handled, where tenants share the server.
current_tenant: ContextVar[str | None] = ContextVar("current_tenant", default=None)
# Whether it is a line of a batch, for which nobody waits.
runs_in_background: ContextVar[bool] = ContextVar("runs_in_background", default=False)


class Bucket:
    """What may be spent in a minute: it fills evenly, and holds a minute's worth at most.

    Owns: its level, which a debt brings below 0.

    Args:
        per_minute: How much.
        now: Monotonic seconds.
    """

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._filled_at = now

    def wait_s(self, amount: float, now: float) -> float:
        """Return the seconds until an amount may be spent; 0: at once.

        More than a minute's worth may be spent when the bucket is full.
        """
        self._fill(now)
        missing = min(amount, self.per_minute) - self._level
        # Rounding must not keep one waiting who waited as long as was said.
        return max(0.0, missing) * _MINUTE_S / self.per_minute if missing > 1e-6 else 0.0

    def spend(self, amount: float, now: float) -> None:
        """Take an amount out, whether it is there or not."""
        self._fill(now)
        self._level -= amount

    def _fill(self, now: float) -> None:
        passed = max(0.0, now - self._filled_at)
        self._level = min(self.per_minute, self._level + passed * self.per_minute / _MINUTE_S)
        self._filled_at = now


class TenantLimits:
    """Lets requests of tenants in, or says what they exceed.

    A prompt's tokens are spent when it comes, an answer's when it ends: a tenant that is in debt
    then waits longer.

    Owns: the tenants' buckets.

    Args:
        config: The tenants.
        share: The part of each limit that holds here, where several processes serve.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        config: TenantsConfig,
        share: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._clock = clock
        self._share = share
        now = clock()
        self._requests = {
            t.name: Bucket(self._part(t.requests_per_minute), now)
            for t in config.tenants.values()
            if t.requests_per_minute is not None
        }
        self._tokens = {
            t.name: Bucket(self._part(t.tokens_per_minute), now)
            for t in config.tenants.values()
            if t.tokens_per_minute is not None
        }

    def _part(self, limit: int) -> int:
        # Rounded down, so that all parts together are no more than the whole; see ``check_parts``.
        return max(1, int(limit * self._share + 1e-6))

    def find(self, name: str | None) -> Tenant:
        """Return the tenant of a request."""
        return self._config.find(name)

    def admit(
        self,
        tenant: Tenant,
        num_tokens: int,
        count_waiting: Callable[[], int],
        num_new: int = 1,
    ) -> None:
        """Let a request in, or a call that is answered by several.

        Args:
            tenant: Whose it is.
            num_tokens: Of its prompt.
            count_waiting: Counts the tenant's requests that wait for their first token.
            num_new: Requests that would wait, too; all together they count as one a minute.

        Raises:
            TenantLimitError: The tenant exceeds a limit; nothing was spent.
        """
        now, name = self._clock(), tenant.name
        most = tenant.max_queued_requests
        if most is not None and (num_waiting := count_waiting()) + num_new > self._part(most):
            more = f", and this call brings {num_new}" if num_new > 1 else ""
            raise TenantLimitError(
                f"Tenant {name!r} exceeds max_queued_requests={most}: {num_waiting} of its "
                f"requests wait for their first token{more}.",
                "max_queued_requests",
            )
        asked = (
            ("requests_per_minute", self._requests.get(name), 1),
            ("tokens_per_minute", self._tokens.get(name), num_tokens),
        )
        for limit, bucket, amount in asked:
            wait_s = 0.0 if bucket is None else bucket.wait_s(amount, now)
            if wait_s:
                raise TenantLimitError(
                    f"Tenant {name!r} exceeds {limit}={getattr(tenant, limit)}: "
                    f"{amount} more may be spent in {wait_s:.1f} s.",
                    limit,
                    max(1, math.ceil(wait_s)),
                )
        for _limit, bucket, amount in asked:
            if bucket is not None:
                bucket.spend(amount, now)

    def note_output(self, name: str, num_tokens: int) -> None:
        """Spend an answer's tokens."""
        bucket = self._tokens.get(name)
        if bucket is not None:
            bucket.spend(num_tokens, self._clock())


def check_parts(config: TenantsConfig | None, num_processes: int, setting: str) -> None:
    """Refuse limits that cannot be parted among processes that serve side by side.

    Args:
        config: The tenants; None: there are none.
        num_processes: Each of which enforces its part of every limit.
        setting: What says how many there are, for the error.

    Raises:
        ConfigError: A limit is below their number.
    """
    for tenant in () if config is None else config.tenants.values():
        for limit in ("requests_per_minute", "tokens_per_minute", "max_queued_requests"):
            value = getattr(tenant, limit)
            if value is not None and value < num_processes:
                raise ConfigError(
                    f"Tenant {tenant.name!r} has {limit}={value}, and {setting}={num_processes} "
                    f"processes enforce an equal part each: make it {num_processes} or more, or "
                    f"lower {setting}."
                )


def tenant_salt(tenant: Tenant, salt: str | None) -> str | None:
    """Return the cache salt of a request: one of the tenant's own where its cache is its own.

    A salt that a client gives parts a tenant's prefixes further; nobody can give another tenant's.
    """
    if not tenant.has_own_cache:
        return salt
    parts = f"{len(tenant.name)}:{tenant.name}:{'' if salt is None else '=' + salt}"
    return "tenant-" + sha256(parts.encode("utf-8", "surrogatepass")).hexdigest()
