// Lua: runs the file that the first argument names; the others are for it.

#include <lua5.4/lauxlib.h>
#include <lua5.4/lua.h>
#include <lua5.4/lualib.h>
#include <stdio.h>

int main(int argc, char **argv) {
    lua_State *state = luaL_newstate();
    if (argc < 2 || !state)
        return 2;
    luaL_openlibs(state);
    lua_newtable(state);
    for (int at = 2; at < argc; at++) {
        lua_pushstring(state, argv[at]);
        lua_rawseti(state, -2, at - 1);
    }
    lua_setglobal(state, "arg");
    if (luaL_dofile(state, argv[1]) != LUA_OK) {
        fprintf(stderr, "%s\n", lua_tostring(state, -1));
        return 1;
    }
    lua_close(state);
    return 0;
}
