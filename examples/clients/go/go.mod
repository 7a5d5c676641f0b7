module headrace.example/clients

go 1.19
