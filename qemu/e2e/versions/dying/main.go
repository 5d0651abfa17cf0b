// Program dying takes the place of kube-controller-manager: it is healthy, and ends with an
// error some time later.
package main

import (
	"crypto/tls"
	"fmt"
	"net/http"
	"os"
	"time"

	"github.com/garboard-os/garboard/config/pki"
)

// life is longer than a program needs to be ready, and shorter than the first one of an
// upgrade is watched.
const life = 20 * time.Second

func main() {
	fmt.Fprintln(os.Stderr, run())
	os.Exit(1)
}

func run() error {
	ca, err := pki.NewKubernetesCA(time.Now())
	if err != nil {
		return err
	}
	crt, key, err := ca.Issue(pki.Leaf{CN: "dying", Server: true, DNS: []string{"localhost"}, Now: time.Now()})
	if err != nil {
		return err
	}
	pair, err := tls.X509KeyPair(crt, key)
	if err != nil {
		return err
	}
	server := &http.Server{
		Addr:      "127.0.0.1:10257",
		Handler:   http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") }),
		TLSConfig: &tls.Config{Certificates: []tls.Certificate{pair}, MinVersion: tls.VersionTLS13},
	}
	failed := make(chan error, 1)
	go func() { failed <- server.ListenAndServeTLS("", "") }()
	select {
	case err := <-failed:
		return err
	case <-time.After(life):
		return fmt.Errorf("dying: the end after %s", life)
	}
}
