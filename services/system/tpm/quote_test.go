package tpm

import (
	"bytes"
	"crypto/rsa"
	"strings"
	"testing"

	"github.com/garboard-os/garboard/api/attest"
	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/tools/testing/owner"
	"github.com/garboard-os/garboard/tools/testing/softtpm"
)

// A real TPM's answer proves which system runs; one that is recorded, changed, or of another system or TPM proves
// nothing.
func TestAttest(t *testing.T) {
	t.Parallel()
	m := softtpm.New(t)
	_, keys := owner.Keys(t)
	_, thief := owner.Keys(t)
	public, ok := keys.PCR.Public().(*rsa.PublicKey)
	if !ok {
		t.Fatal("the PCR key isn't one of RSA")
	}
	nonce := []byte("of today, 16 bytes and more")
	// answer is that of a node on a machine that was booted.
	answer := func(on *softtpm.Machine, left string, nonce []byte) *apiv1.AttestResponse {
		t.Helper()
		node := booted(on, left)
		before, err := node.Values(SystemPCR)
		if err != nil {
			t.Fatal(err)
		}
		if err := node.Close(); err != nil {
			t.Fatal(err)
		}
		q, err := node.Quote(nonce)
		if err != nil {
			t.Fatal(err)
		}
		a := &apiv1.AttestResponse{Quoted: q.Quoted, Signature: q.Signature, Key: q.Key, System: before[SystemPCR], Signatures: q.Signatures, Pcrs: map[uint32][]byte{}}
		for pcr, value := range q.PCRs {
			a.Pcrs[uint32(pcr)] = value
		}
		return a
	}
	boot := func(firmware string, of *softtpm.Owner) string {
		return m.Boot(firmware, of, softtpm.Section{Name: ".linux", Content: []byte("v1")})
	}
	good := answer(m, boot("db", keys), nonce)
	proven, err := attest.Verify(good, nonce, public, attest.Proven{})
	if err != nil || len(proven.TPM) != 68 || len(proven.PCR7) != 64 {
		t.Fatalf("%+v, %v", proven, err)
	}
	again, err := attest.Verify(answer(m, boot("db", keys), []byte("of tomorrow, a boot later")), []byte("of tomorrow, a boot later"), public, proven)
	if err != nil || again != proven {
		t.Errorf("the next boot: %+v, %v", again, err)
	}

	other := softtpm.New(t)
	elsewhere := other.Boot("db", keys, softtpm.Section{Name: ".linux", Content: []byte("v1")})
	changed := func(change func(a *apiv1.AttestResponse)) *apiv1.AttestResponse {
		a := &apiv1.AttestResponse{Quoted: bytes.Clone(good.Quoted), Signature: bytes.Clone(good.Signature), Key: bytes.Clone(good.Key), System: bytes.Clone(good.System), Signatures: good.Signatures, Pcrs: map[uint32][]byte{}}
		for pcr, value := range good.Pcrs {
			a.Pcrs[pcr] = bytes.Clone(value)
		}
		change(a)
		return a
	}
	for what, c := range map[string]struct {
		answer *apiv1.AttestResponse
		nonce  []byte
		owner  *rsa.PublicKey
		want   string
	}{
		"recorded":            {good, []byte("another nonce of 16 bytes"), public, "recorded before"},
		"another TPM":         {answer(other, elsewhere, nonce), nonce, public, "another TPM"},
		"other firmware keys": {answer(m, boot("db of a thief", keys), nonce), nonce, public, "PCR 7"},
		"another owner":       {answer(m, boot("db", thief), nonce), nonce, public, "hasn't signed the system"},
		"a changed value":     {changed(func(a *apiv1.AttestResponse) { a.Pcrs[7][0] ^= 1 }), nonce, public, "aren't those that the TPM has signed"},
		"a changed quote":     {changed(func(a *apiv1.AttestResponse) { a.Quoted[len(a.Quoted)-1] ^= 1 }), nonce, public, "of another key"},
		"a changed system":    {changed(func(a *apiv1.AttestResponse) { a.System[0] ^= 1 }), nonce, public, "measured after the system"},
		"no values":           {changed(func(a *apiv1.AttestResponse) { a.Pcrs = nil }), nonce, public, "aren't those that the TPM has signed"},
		"no signatures":       {changed(func(a *apiv1.AttestResponse) { a.Signatures = nil }), nonce, public, "signatures of the system"},
		"no key":              {changed(func(a *apiv1.AttestResponse) { a.Key = nil }), nonce, public, "the key"},
		"no signature":        {changed(func(a *apiv1.AttestResponse) { a.Signature = a.Signature[:5] }), nonce, public, "the signature"},
	} {
		if _, err := attest.Verify(c.answer, c.nonce, c.owner, proven); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %s", what, err, c.want)
		}
	}
	left := boot("db", keys)
	m.Measure(12, "init=/bin/sh")
	if _, err := attest.Verify(answer(m, left, nonce), nonce, public, proven); err == nil || !strings.Contains(err.Error(), "from outside") {
		t.Errorf("arguments from outside: %v", err)
	}
}
