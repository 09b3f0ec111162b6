#include "apps/mla_run/commands.h"

int main(int argc, char** argv) { return mla::run_program(argc, argv); }
