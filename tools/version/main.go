// Command version prints the version of the code in this checkout (package image/version).
package main

import (
	"context"
	"fmt"
	"log"

	"github.com/garboard-os/garboard/image/version"
)

func main() {
	name, err := version.Of(context.Background(), ".")
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(name)
}
