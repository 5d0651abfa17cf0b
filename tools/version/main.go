// Command version prints the version of the code in this checkout (package image/version).
package main

import (
	"context"
	"fmt"
	"os"

	"github.com/garboard-os/garboard/image/version"
)

func main() {
	name, err := version.Of(context.Background(), ".")
	if err != nil {
		fmt.Fprintln(os.Stderr, "error:", err)
		os.Exit(1)
	}
	fmt.Println(name)
}
