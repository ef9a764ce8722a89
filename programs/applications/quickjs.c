// QuickJS: runs the file that the first argument names; the others are for it.

#include <quickjs.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static JSValue print(JSContext *context, JSValueConst this, int count, JSValueConst *values) {
    (void)this;
    for (int at = 0; at < count; at++) {
        const char *text = JS_ToCString(context, values[at]);
        printf("%s%s", at ? " " : "", text ? text : "?");
        JS_FreeCString(context, text);
    }
    puts("");
    fflush(stdout);
    return JS_UNDEFINED;
}

static char *read_file(const char *path, size_t *length) {
    FILE *file = fopen(path, "r");
    if (!file)
        return 0;
    char *text = malloc(1 << 16);
    *length = fread(text, 1, (1 << 16) - 1, file);
    text[*length] = 0;
    fclose(file);
    return text;
}

int main(int argc, char **argv) {
    size_t length;
    char *text = argc < 2 ? 0 : read_file(argv[1], &length);
    if (!text)
        return 2;
    JSRuntime *runtime = JS_NewRuntime();
    JSContext *context = JS_NewContext(runtime);
    JSValue global = JS_GetGlobalObject(context);
    JS_SetPropertyStr(context, global, "print", JS_NewCFunction(context, print, "print", 1));
    JSValue arguments = JS_NewArray(context);
    for (int at = 2; at < argc; at++)
        JS_SetPropertyUint32(context, arguments, at - 2, JS_NewString(context, argv[at]));
    JS_SetPropertyStr(context, global, "args", arguments);
    JSValue result = JS_Eval(context, text, length, argv[1], JS_EVAL_TYPE_GLOBAL);
    int failed = JS_IsException(result);
    if (failed) {
        JSValue exception = JS_GetException(context);
        const char *words = JS_ToCString(context, exception);
        fprintf(stderr, "%s\n", words ? words : "an exception");
        JS_FreeCString(context, words);
        JS_FreeValue(context, exception);
    }
    JS_FreeValue(context, result);
    JS_FreeValue(context, global);
    JS_FreeContext(context);
    JS_FreeRuntime(runtime);
    free(text);
    return failed;
}
