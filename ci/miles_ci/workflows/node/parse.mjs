// arguments: workflow files; stdout: JSON {path: {errors: [...], jobs: {id: {if, needs}}}} by GitHub's own parser.
import fs from "node:fs";
import { convertWorkflowTemplate, NoOperationTraceWriter, parseWorkflow } from "@actions/workflow-parser";

const out = {};
for (const name of process.argv.slice(2)) {
  const parsed = parseWorkflow({ name, content: fs.readFileSync(name, "utf8") }, new NoOperationTraceWriter());
  const jobs = {};
  const errors = parsed.context.errors.getErrors().map((error) => error.message);
  if (parsed.value && errors.length === 0) {
    const template = await convertWorkflowTemplate(parsed.context, parsed.value);
    for (const error of template.errors ?? []) errors.push(error.Message ?? String(error));
    for (const job of template.jobs) {
      const id = job.id.value ?? String(job.id);
      jobs[id] = { if: job.if?.expression ?? null, needs: (job.needs ?? []).map((need) => need.value ?? String(need)) };
    }
  }
  out[name] = { errors, jobs };
}
process.stdout.write(JSON.stringify(out));
