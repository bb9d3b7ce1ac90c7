"""The tables of the history, as the steps by which they came to be. `PRAGMA user_version` counts those taken.

A step that a release has had is never changed: a new one is added below. Each is run in one transaction.
"""

APPLICATION_ID = 0x46697265  # "Fire", in the file's header: whose database this is

_CHATS = (
    """
    CREATE TABLE chats (
        id TEXT PRIMARY KEY,
        title TEXT NOT NULL,
        folder TEXT NOT NULL,
        is_pinned INTEGER NOT NULL,
        model_id TEXT NOT NULL,
        system TEXT NOT NULL,
        sampling TEXT NOT NULL,
        leaf_id TEXT,
        created_at REAL NOT NULL,
        updated_at REAL NOT NULL,
        deleted_at REAL
    )
    """,
    "CREATE INDEX chats_as_listed ON chats (is_pinned DESC, updated_at DESC)",
    # writer: the process that an answer in the making belongs to. seq orders, and is what the search knows.
    """
    CREATE TABLE nodes (
        seq INTEGER PRIMARY KEY,
        id TEXT NOT NULL UNIQUE,
        chat_id TEXT NOT NULL REFERENCES chats (id) ON DELETE CASCADE,
        parent_id TEXT REFERENCES nodes (id),
        role TEXT NOT NULL,
        state TEXT NOT NULL,
        writer TEXT,
        created_at REAL NOT NULL,
        attachments TEXT NOT NULL,
        meta TEXT NOT NULL,
        reasoning TEXT NOT NULL,
        text TEXT NOT NULL
    )
    """,
    "CREATE INDEX nodes_by_parent ON nodes (parent_id, chat_id, seq)",
    "CREATE INDEX nodes_by_chat ON nodes (chat_id, seq)",
    "CREATE INDEX nodes_in_the_making ON nodes (writer) WHERE state = 'writing'",
)

# Pieces of three characters find parts of words, and words of languages that put no spaces between them. An answer in
# the making is written several times a second and gets into the index once, when it is over.
_WORDS = (
    "CREATE VIRTUAL TABLE words USING fts5 (text, content = 'nodes', content_rowid = 'seq', tokenize = 'trigram')",
    "INSERT INTO words (rowid, text) SELECT seq, text FROM nodes WHERE state <> 'writing'",
    """
    CREATE TRIGGER words_of_new AFTER INSERT ON nodes WHEN new.state <> 'writing' BEGIN
        INSERT INTO words (rowid, text) VALUES (new.seq, new.text);
    END
    """,
    """
    CREATE TRIGGER words_before_change BEFORE UPDATE OF text, state ON nodes WHEN old.state <> 'writing' BEGIN
        INSERT INTO words (words, rowid, text) VALUES ('delete', old.seq, old.text);
    END
    """,
    """
    CREATE TRIGGER words_after_change AFTER UPDATE OF text, state ON nodes WHEN new.state <> 'writing' BEGIN
        INSERT INTO words (rowid, text) VALUES (new.seq, new.text);
    END
    """,
    """
    CREATE TRIGGER words_of_gone AFTER DELETE ON nodes WHEN old.state <> 'writing' BEGIN
        INSERT INTO words (words, rowid, text) VALUES ('delete', old.seq, old.text);
    END
    """,
)

# A file is there before the message that it goes with: until then it belongs to no chat.
_ATTACHMENTS = (
    """
    CREATE TABLE attachments (
        id TEXT PRIMARY KEY,
        chat_id TEXT REFERENCES chats (id) ON DELETE CASCADE,
        name TEXT NOT NULL,
        kind TEXT NOT NULL,
        num_bytes INTEGER NOT NULL,
        created_at REAL NOT NULL,
        text TEXT NOT NULL
    )
    """,
    "CREATE INDEX attachments_by_chat ON attachments (chat_id)",
)

_PRESETS = (
    """
    CREATE TABLE presets (
        name TEXT PRIMARY KEY,
        system TEXT NOT NULL,
        sampling TEXT NOT NULL
    )
    """,
)

MIGRATIONS: tuple[tuple[str, ...], ...] = (_CHATS, _WORDS, _ATTACHMENTS, _PRESETS)
