-- The tables of the index. Change SCHEMA_VERSION in index.py with them.
CREATE TABLE files (
    name TEXT PRIMARY KEY,
    size INTEGER NOT NULL,
    mtime_ns INTEGER NOT NULL,
    rollouts INTEGER NOT NULL,
    problem TEXT NOT NULL
);
CREATE TABLE rollouts (
    id INTEGER PRIMARY KEY,
    file TEXT NOT NULL,
    number INTEGER NOT NULL,
    start INTEGER NOT NULL,
    size INTEGER NOT NULL,
    trace_id TEXT NOT NULL,
    group_id TEXT NOT NULL,
    env TEXT NOT NULL,
    task INTEGER NOT NULL,
    split TEXT NOT NULL,
    step INTEGER,
    reward REAL,
    rewards TEXT NOT NULL,
    verdict TEXT NOT NULL,
    error TEXT NOT NULL,
    turns INTEGER NOT NULL,
    branches INTEGER NOT NULL,
    tokens INTEGER NOT NULL,
    sampled INTEGER NOT NULL,
    images INTEGER NOT NULL,
    lag INTEGER,
    seconds REAL,
    answer TEXT NOT NULL,
    advantage REAL,
    kl REAL,
    worst_ratio REAL
);
CREATE UNIQUE INDEX rollouts_place ON rollouts (file, number);
CREATE INDEX rollouts_trace ON rollouts (trace_id, step);
CREATE INDEX rollouts_step ON rollouts (step, id);
CREATE INDEX rollouts_verdict ON rollouts (verdict, step);
CREATE INDEX rollouts_reward ON rollouts (reward, id);
CREATE INDEX rollouts_group ON rollouts (group_id, file, step, reward, tokens);
CREATE INDEX rollouts_error ON rollouts (error) WHERE error != '';
CREATE TABLE texts (id INTEGER PRIMARY KEY, digest BLOB NOT NULL UNIQUE, text TEXT NOT NULL);
CREATE TABLE says (
    text INTEGER NOT NULL, rollout INTEGER NOT NULL, PRIMARY KEY (text, rollout)
) WITHOUT ROWID;
CREATE INDEX says_rollout ON says (rollout);
CREATE TABLE images (
    digest TEXT PRIMARY KEY,
    mime TEXT NOT NULL,
    width INTEGER NOT NULL,
    height INTEGER NOT NULL,
    nbytes INTEGER NOT NULL,
    num_shown INTEGER NOT NULL
);
CREATE INDEX images_shown ON images (num_shown, digest);
CREATE TABLE shows (
    digest TEXT NOT NULL, rollout INTEGER NOT NULL, node INTEGER NOT NULL, place INTEGER NOT NULL,
    PRIMARY KEY (digest, rollout, node, place)
) WITHOUT ROWID;
CREATE INDEX shows_rollout ON shows (rollout, node, place);
CREATE TABLE scored (step INTEGER PRIMARY KEY, stamp TEXT NOT NULL, problem TEXT NOT NULL);
CREATE TABLE mismatch (
    step INTEGER NOT NULL,
    dimension TEXT NOT NULL,
    bucket INTEGER NOT NULL,
    fresh INTEGER NOT NULL,
    tokens INTEGER NOT NULL,
    kl REAL NOT NULL,
    ratio REAL NOT NULL,
    worst REAL NOT NULL,
    PRIMARY KEY (dimension, fresh, step, bucket)
) WITHOUT ROWID;
CREATE TABLE worst (
    step INTEGER NOT NULL,
    rollout INTEGER NOT NULL,
    node INTEGER NOT NULL,
    place INTEGER NOT NULL,
    token_id INTEGER NOT NULL,
    lag INTEGER NOT NULL,
    kl REAL NOT NULL,
    ratio REAL NOT NULL,
    sampler REAL NOT NULL,
    trainer REAL NOT NULL,
    digest TEXT NOT NULL,
    distance INTEGER NOT NULL
);
CREATE INDEX worst_kl ON worst (kl);
CREATE INDEX worst_step ON worst (step);
