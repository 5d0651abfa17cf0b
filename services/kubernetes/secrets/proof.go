package secrets

import (
	"github.com/garboard-os/garboard/config/pki"
	"github.com/garboard-os/garboard/services/core/resource"
)

// SignPurpose is that of the proof with which a kubelet's client certificate asks for one of
// the machine API.
const SignPurpose = "certificate of the machine API"

// RenewPurpose is that of the proof with which a node's present certificate of the machine API asks
// for the next one.
const RenewPurpose = "renewal of the certificate of the machine API"

// Prove proves that this machine has made a message, with the key of its machine API.
func Prove(r resource.Reader, purpose string, message []byte) ([]byte, error) {
	own, err := API.Get(r, APIID)
	if err != nil {
		return nil, err
	}
	return pki.Prove(own.Spec.Serving.Crt, own.Spec.Serving.Key, purpose, message)
}
