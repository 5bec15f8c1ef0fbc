// Runs the search worker of the built site, as a browser would: node search_site.js SITE QUERY...
// Prints a JSON list with the addresses of the pages found for each query, best first.
const fs = require("fs"), path = require("path"), vm = require("vm")
const [site, ...queries] = process.argv.slice(2)
const workers = path.join(site, "assets/javascripts/workers")
const worker = fs.readdirSync(workers).find(name => /^search\..*\.js$/.test(name))
let receive, answer
globalThis.self = globalThis
globalThis.addEventListener = (type, listener) => { if (type === "message") receive = listener }
globalThis.postMessage = message => answer(message)
const ask = message => new Promise(resolve => { answer = resolve; receive({ data: message }) })

async function main() {
  vm.runInThisContext(fs.readFileSync(path.join(workers, worker), "utf8"))
  const index = JSON.parse(fs.readFileSync(path.join(site, "search/search_index.json"), "utf8"))
  index.options = { suggest: true }
  await ask({ type: 0, data: index })
  const found = []
  for (const query of queries) {
    const { data } = await ask({ type: 2, data: query })
    found.push(data.items.map(items => items[0].location.replace(/#.*/, "")))
  }
  console.log(JSON.stringify(found))
}
main()
