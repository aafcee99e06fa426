// pg-transactional-outbox: the polling listener of its README, with its batch of 5 or another (BENCH_BATCH); a message is
// a POST. LISTENER_TYPE=replication takes the logical replication listener instead.
import {
  createReplicationMultiConcurrencyController,
  DatabaseSetupExporter,
  getDisabledLogger,
  initializePollingMessageListener,
  initializeReplicationMessageListener,
} from "pg-transactional-outbox";

const connection = { connectionString: process.env.DATABASE_URL };
const url = `${process.env.FRONTEND_BASE_URL}/api/ingest/sync`;
const replication = process.env.LISTENER_TYPE === "replication";
const names = {
  outboxOrInbox: "outbox",
  database: process.env.BENCH_DATABASE,
  schema: "public",
  table: "outbox",
  listenerRole: process.env.BENCH_ROLE,
};

if (process.argv[2] === "sql") {
  const more = { nextMessagesName: "next_outbox_messages", publication: "outbox_pub", replicationSlot: "" };
  console.log(DatabaseSetupExporter.createPollingScript({ ...names, ...more }, true));
  process.exit(0);
}

const handler = {
  handle: async (message) => {
    const answer = await fetch(url, {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify({ entries: [message.payload] }),
    });
    const said = await answer.json();
    if (!answer.ok || said.ok !== true) throw new Error(`HTTP ${answer.status}`);
  },
};
const base = {
  dbSchema: "public",
  dbTable: "outbox",
  enableMaxAttemptsProtection: false,
  enablePoisonousMessageProtection: false,
};
if (replication) {
  initializeReplicationMessageListener(
    {
      outboxOrInbox: "outbox",
      dbListenerConfig: connection,
      settings: { ...base, dbPublication: "outbox_pub", dbReplicationSlot: process.env.BENCH_SLOT },
    },
    handler,
    getDisabledLogger(),
    { concurrencyStrategy: createReplicationMultiConcurrencyController(() => "full-concurrency") },
  );
} else {
  initializePollingMessageListener(
    {
      outboxOrInbox: "outbox",
      dbListenerConfig: connection,
      settings: {
        ...base,
        nextMessagesBatchSize: Number(process.env.BENCH_BATCH ?? 5),
        nextMessagesFunctionName: "next_outbox_messages",
        nextMessagesPollingIntervalInMs: 250,
      },
    },
    handler,
    getDisabledLogger(),
  );
}
