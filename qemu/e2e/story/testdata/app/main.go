// An app counts its visitors in a file.
package main

import (
	"fmt"
	"net/http"
	"os"
	"strconv"
	"strings"
)

const file = "/data/visitors"

func main() {
	http.HandleFunc("/", func(w http.ResponseWriter, _ *http.Request) {
		text, _ := os.ReadFile(file)
		count, _ := strconv.Atoi(strings.TrimSpace(string(text)))
		if err := os.WriteFile(file, []byte(strconv.Itoa(count+1)), 0o644); err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		fmt.Fprintf(w, "visitor %d of the first version\n", count+1)
	})
	panic(http.ListenAndServe(":8080", nil))
}
