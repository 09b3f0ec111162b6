// The main function for Catch2 2, which has none of its own.
#define CATCH_CONFIG_MAIN
#include <catch2/catch.hpp>
