-- Tables, strings, closures and trees for the collector, which finds much of it dead. The first argument is
-- the number of entries.

local count = tonumber(arg[1])
local seed = 12345

local function random(limit)
    seed = (seed * 1103515245 + 12345) % 2147483648
    return seed // 7 % limit
end

local answer = 0xcbf29ce484222325
local function note(text)
    for at = 1, #text do
        answer = (answer ~ text:byte(at)) * 0x100000001b3
    end
end

local function tree(depth)
    if depth == 0 then
        return { value = random(1000) }
    end
    return { tree(depth - 1), tree(depth - 1), value = random(1000) }
end

local function sum(node)
    if not node[1] then
        return node.value
    end
    return node.value + sum(node[1]) - sum(node[2])
end

local by_name, in_order = {}, {}
for number = 1, count do
    local name = string.format("%x-%d-%s", random(1 << 24), number, string.rep("ab", random(12)))
    local entry = { name = name, number = number, weight = random(100000) }
    by_name[name] = entry
    in_order[number] = entry
end
for round = 1, 4 do
    note(tostring(sum(tree(12 + round % 2))))
end
table.sort(in_order, function(a, b)
    return a.weight < b.weight or a.weight == b.weight and a.number < b.number
end)
for at = 1, count, 16 do
    note(in_order[at].name)
end
for at = 1, count do
    if in_order[at].weight % 3 == 0 then
        by_name[in_order[at].name] = nil
    else
        in_order[at].next = in_order[in_order[at].number]
    end
end
collectgarbage()
for at = 1, count, 8 do
    local entry, steps = in_order[at], 0
    while entry and steps < 10 do
        entry, steps = entry.next, steps + 1
    end
    note((entry and entry.name or "none") .. steps)
end
local left, weight = 0, 0
for name, entry in pairs(by_name) do
    assert(entry.name == name)
    left, weight = left + 1, weight + entry.weight
end
note(left .. " " .. weight)
print(string.format("answer %016x", answer))
