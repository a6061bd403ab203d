"""The scripts that change a session in Redis, each in one step.

They use neither cjson nor TIME, so that every Redis, Valkey and proxy runs them. Times come from the callers; keys
that are found at run time have the store's prefix, which is given. All keys get a time to live.
"""

from __future__ import annotations

import hashlib


class Script:
    """A script and the name that the server knows it by once it has seen it."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.sha = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()


# Takes a session out of what a worker holds.
_LEAVE = """
local function leave(prefix, worker, key)
  local held = worker ~= '' and redis.call('HGET', prefix .. 'wk:' .. worker, key)
  if held then
    redis.call('HDEL', prefix .. 'wk:' .. worker, key)
    redis.call('ZREM', prefix .. 'wx:' .. worker, key)
    redis.call('DECRBY', prefix .. 'ws:' .. worker, held)
  end
end
"""

# KEYS: session, lease, turns, tenant's sessions. ARGV: token, lease ms, ttl ms, now, limit, known version, least epoch,
# prefix, session key, then field, value, … of a session that is not there yet.
# Returns {"busy"}, {"full"} or {"ok", epoch, version, fields, links or false when the caller's copy is current}.
CLAIM = Script(
    _LEAVE
    + """
local holder = redis.call('GET', KEYS[2])
if holder and holder ~= ARGV[1] then return {'busy'} end
if redis.call('EXISTS', KEYS[1]) == 0 then
  if redis.call('ZCARD', KEYS[4]) >= tonumber(ARGV[5]) then
    local gone = false
    for _, key in ipairs(redis.call('ZRANGE', KEYS[4], 0, 15)) do
      if redis.call('EXISTS', ARGV[8] .. 'l:' .. key) == 0 then
        leave(ARGV[8], redis.call('HGET', ARGV[8] .. 's:' .. key, 'worker') or '', key)
        redis.call('DEL', ARGV[8] .. 's:' .. key, ARGV[8] .. 't:' .. key)
        redis.call('ZREM', KEYS[4], key)
        gone = true
        break
      end
    end
    if not gone then return {'full'} end
  end
  local fields = {}
  for i = 10, #ARGV do fields[#fields + 1] = ARGV[i] end
  redis.call('HSET', KEYS[1], 'epoch', 0, unpack(fields))
  redis.call('DEL', KEYS[3])
end
redis.call('SET', KEYS[2], ARGV[1], 'PX', ARGV[2])
local epoch = tonumber(redis.call('HGET', KEYS[1], 'epoch'))
if epoch < tonumber(ARGV[7]) then epoch = tonumber(ARGV[7]) end
redis.call('HSET', KEYS[1], 'epoch', epoch + 1)
redis.call('ZADD', KEYS[4], ARGV[4], ARGV[9])
redis.call('PEXPIRE', KEYS[1], ARGV[3])
redis.call('PEXPIRE', KEYS[3], ARGV[3])
redis.call('PEXPIRE', KEYS[4], ARGV[3])
local version = redis.call('HGET', KEYS[1], 'version')
local links = false
if version ~= ARGV[6] then links = redis.call('HKEYS', KEYS[3]) end
return {'ok', epoch, version, redis.call('HGETALL', KEYS[1]), links}
"""
)

# KEYS: session, lease. ARGV: token, epoch of the turn. Returns the new epoch, or -1 when the lease is lost.
BUMP = Script("""
if redis.call('HGET', KEYS[1], 'epoch') ~= tostring(tonumber(ARGV[2]) + 1) then return -1 end
redis.call('HINCRBY', KEYS[1], 'epoch', 1)
return tonumber(ARGV[2]) + 1
""")

# KEYS: session, lease, turns, then index sets. ARGV: token, epoch of the turn, ttl ms, now, prefix, session key,
# number of new turns, link, turn, …, number of dropped links, links…, then fields and values of the session.
# A commit is conditional on the epoch: whoever was overtaken writes nothing. Returns 1, or 0 when overtaken.
COMMIT = Script(
    _LEAVE
    + """
if redis.call('HGET', KEYS[1], 'epoch') ~= tostring(tonumber(ARGV[2]) + 1) then return 0 end
local ttl, key, prefix = ARGV[3], ARGV[6], ARGV[5]
local old_worker = redis.call('HGET', KEYS[1], 'worker') or ''
local at = 8
for _ = 1, tonumber(ARGV[7]) do
  redis.call('HSET', KEYS[3], ARGV[at], ARGV[at + 1])
  at = at + 2
end
local dropped = tonumber(ARGV[at])
at = at + 1
for _ = 1, dropped do
  redis.call('HDEL', KEYS[3], ARGV[at])
  at = at + 1
end
local worker, tokens = '', 0
local fields = {}
for i = at, #ARGV, 2 do
  fields[#fields + 1] = ARGV[i]
  fields[#fields + 1] = ARGV[i + 1]
  if ARGV[i] == 'worker' then worker = ARGV[i + 1] end
  if ARGV[i] == 'kv_tokens' then tokens = tonumber(ARGV[i + 1]) end
end
redis.call('HSET', KEYS[1], unpack(fields))
redis.call('HINCRBY', KEYS[1], 'version', 1)
for i = 4, #KEYS do
  redis.call('SADD', KEYS[i], key)
  redis.call('PEXPIRE', KEYS[i], ttl)
end
if old_worker ~= worker then leave(prefix, old_worker, key) end
if worker ~= '' then
  local held = redis.call('HGET', prefix .. 'wk:' .. worker, key) or 0
  redis.call('HSET', prefix .. 'wk:' .. worker, key, tokens)
  redis.call('ZADD', prefix .. 'wx:' .. worker, tonumber(ARGV[4]) + tonumber(ttl) / 1000, key)
  redis.call('INCRBY', prefix .. 'ws:' .. worker, tokens - tonumber(held))
  for _, kind in ipairs({'wk:', 'wx:', 'ws:'}) do redis.call('PEXPIRE', prefix .. kind .. worker, ttl) end
end
redis.call('PEXPIRE', KEYS[1], ttl)
redis.call('PEXPIRE', KEYS[3], ttl)
if redis.call('GET', KEYS[2]) == ARGV[1] then redis.call('DEL', KEYS[2]) end
return 1
"""
)

# KEYS: session, lease, turns, tenant's sessions. ARGV: token, epoch of the turn, 1 when it was dispatched, session key.
RELEASE = Script("""
if redis.call('GET', KEYS[2]) == ARGV[1] then redis.call('DEL', KEYS[2]) end
if ARGV[3] == '1' then return 1 end
if redis.call('HGET', KEYS[1], 'epoch') ~= tostring(tonumber(ARGV[2]) + 1) then return 0 end
redis.call('HSET', KEYS[1], 'epoch', ARGV[2])
if ARGV[2] == '0' and redis.call('HLEN', KEYS[3]) == 0 then
  redis.call('DEL', KEYS[1])
  redis.call('ZREM', KEYS[4], ARGV[4])
end
return 1
""")

# KEYS: lease. ARGV: token. Ends a lease that nobody uses.
FREE = Script("""
if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end
return 0
""")

# KEYS: lease. ARGV: token, lease ms. Returns 0 when the lease is lost.
RENEW = Script("""
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
return redis.call('PEXPIRE', KEYS[1], ARGV[2])
""")

# KEYS: session, lease, turns, tenant's sessions. ARGV: prefix, session key.
DELETE = Script(
    _LEAVE
    + """
leave(ARGV[1], redis.call('HGET', KEYS[1], 'worker') or '', ARGV[2])
redis.call('ZREM', KEYS[4], ARGV[2])
return redis.call('DEL', KEYS[1], KEYS[2], KEYS[3])
"""
)

# KEYS: wk, wx, ws of one worker. ARGV: now. Takes sessions that expired out of the worker's sum.
EXPIRE_WORKER = Script("""
local gone = redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', ARGV[1], 'LIMIT', 0, 1000)
for _, key in ipairs(gone) do
  local held = redis.call('HGET', KEYS[1], key)
  if held then redis.call('DECRBY', KEYS[3], held) end
  redis.call('HDEL', KEYS[1], key)
  redis.call('ZREM', KEYS[2], key)
end
return #gone
""")
