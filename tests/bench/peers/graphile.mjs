// graphile-worker with the settings of its own documentation's page on performance; a job is a POST.
import { run, runMigrations } from "graphile-worker";

const connectionString = process.env.DATABASE_URL;
const url = `${process.env.FRONTEND_BASE_URL}/api/ingest/sync`;

if (process.argv[2] === "prepare") {
  await runMigrations({ connectionString });
  process.exit(0);
}

const quiet = { debug() {}, info() {}, warn: console.warn, error: console.error };
const { Logger } = await import("graphile-worker");
await run({
  preset: {
    worker: {
      connectionString,
      concurrentJobs: 24,
      maxPoolSize: 25,
      localQueue: { size: 500 },
      completeJobBatchDelay: 0,
      failJobBatchDelay: 0,
      logger: new Logger(() => (level, message) => quiet[level === "warning" ? "warn" : level]?.(message)),
    },
  },
  taskList: {
    post: async (entry) => {
      const answer = await fetch(url, {
        method: "POST",
        headers: { "Content-Type": "application/json" },
        body: JSON.stringify({ entries: [entry] }),
      });
      const said = await answer.json();
      if (!answer.ok || said.ok !== true) throw new Error(`HTTP ${answer.status}`);
    },
  },
});
