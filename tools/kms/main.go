// Command kms is a key server for encrypted disks (docs/kms.md).
//
//	go run ./tools/kms -dir /var/lib/kms -name kms.example.org
package main

import (
	"flag"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"github.com/garboard-os/garboard/tools/kms/server"
)

func main() {
	dir := flag.String("dir", ".", "directory with the server's key, its authority and the list of machines")
	name := flag.String("name", "", "name or address in the endpoint of the machines' configurations")
	listen := flag.String("listen", ":8443", "address to listen on")
	flag.Parse()
	if err := run(*dir, *name, *listen); err != nil {
		slog.Error(err.Error())
		os.Exit(1)
	}
}

func run(dir, name, listen string) error {
	key, err := server.Key(dir)
	if err != nil {
		return err
	}
	cert, err := server.Certificate(dir, name, time.Now())
	if err != nil {
		return err
	}
	s := &server.Server{Key: key, List: filepath.Join(dir, "machines"), Log: slog.Default()}
	h := s.HTTP(cert)
	h.Addr = listen
	return h.ListenAndServeTLS("", "")
}
